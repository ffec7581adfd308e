"""Run the ranks of a world as threads of this process, with collectives that need no process group."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from elastic_resume.errors import ElasticResumeError
from elastic_resume.ranks.collectives import Collectives

T = TypeVar("T")


class ThreadCollectives(Collectives):
    """The collectives of a rank that is a thread; all ranks share ``values`` and ``barrier``."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(values), None)
        self._values, self._barrier = values, barrier

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        return [json.loads(text) for text in self._exchange(json.dumps(value))]

    def broadcast_json(self, value: Any, source_rank: int) -> Any:
        """Return the value of the source."""
        own = json.dumps(value) if self.rank == source_rank else ""
        return json.loads(self._exchange(own)[source_rank])

    def broadcast(self, tensor: Tensor, source_rank: int) -> None:
        """Overwrite ``tensor`` with that of the source."""
        sent = self._exchange(tensor.clone())[source_rank]
        if self.rank != source_rank:
            tensor.copy_(sent)

    def _exchange(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


def run_ranks(size: int, action: Callable[[ThreadCollectives], T]) -> list[T]:
    """Run ``action`` on each rank of a world; return the results, or raise an error of one.

    A rank that fails ends the collectives of the others, unless all ranks have that error.
    """
    values: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=30)

    def run(rank: int) -> T:
        try:
            return action(ThreadCollectives(rank, values, barrier))
        except ElasticResumeError:
            raise
        except BaseException:
            barrier.abort()
            raise

    if size == 1:  # a loader's worker that is forked in a thread of a pool ends with exit code 1
        return [run(0)]
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [future.result() for future in futures]
