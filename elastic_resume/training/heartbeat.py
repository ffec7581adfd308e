"""Record a worker's progress for its agent: `RankHeartbeat` writes this rank's record."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch.distributed as dist

from elastic_resume import constants
from elastic_resume.mechanisms.registry import OPEN_EVIDENCE
from elastic_resume.ranks.rank_context import RankContext, assigned_generation
from elastic_resume.slots.progress_page import ProgressPage, WorkerProcess, read_start_ticks

# An evaluation may take hours; ranks that wait within it for one that never comes must not wait for ever.
BUSY_LIMIT_S = 4 * 3600.0


class RankHeartbeat:
    """This rank's record on the progress page, in one generation."""

    def __init__(self, progress_page: ProgressPage, context: RankContext) -> None:
        self._progress_page = progress_page
        self._context = context
        self._local_rank = context.local_rank
        self._pid = os.getpid()
        self._busy_depth = 0
        self._lock = threading.Lock()  # several threads of the script may be busy

    def start_generation(self, generation: int, step: int) -> None:
        """Record the start of ``generation`` at ``step``. Its first step may take any time."""
        collectives = self._context.collectives
        self._progress_page.start_generation(
            self._local_rank,
            generation=generation,
            step=step,
            world_size=collectives.size,
            worker=_describe_worker(collectives.rank),
        )

    def finish_step(self, step: int) -> None:
        """Record that this rank has finished ``step``."""
        self._progress_page.finish_step(self._local_rank, step)

    def set_measurement(self, word: int, value: int) -> None:
        """Record what a mechanism has measured of this rank; 0 if it is unknown."""
        self._progress_page.set_measurement(self._local_rank, word, value)

    def end_epoch(self, step: int) -> None:
        """Record that ``step`` was an epoch's last one; an evaluation may follow."""
        self._progress_page.end_epoch(self._local_rank, step)

    @contextlib.contextmanager
    def idle_afterwards(self) -> Iterator[None]:
        """Record when the block ends that no step need follow, until one does."""
        try:
            yield
        finally:
            self._set_idle()

    def close(self) -> None:
        """Record that no further step follows."""
        self._set_idle()

    @contextlib.contextmanager
    def busy(self, limit_s: float = BUSY_LIMIT_S) -> Iterator[None]:
        """Record a long operation that is not a step, so that none is missed. Blocks may be nested.

        ``limit_s``: see `ProgressPage.set_busy`. The outermost block's limit applies.
        """
        with self._lock:
            self._busy_depth += 1
            if self._busy_depth == 1:
                self._progress_page.set_busy(self._local_rank, True, limit_s)
        try:
            yield
        finally:
            with self._lock:
                self._busy_depth -= 1
                if self._busy_depth == 0:
                    self._progress_page.set_busy(self._local_rank, False)

    def _set_idle(self) -> None:
        if os.getpid() == self._pid:  # a forked child may clean up its copy of this object
            self._progress_page.set_idle(self._local_rank)


_evidence: tuple[int, int, int] | None = None  # process, and the descriptors of `Mechanism.open_evidence`


def _describe_worker(rank: int) -> WorkerProcess:
    """Describe this process; under an agent let it give evidence."""
    global _evidence  # noqa: PLW0603 - once per process, however often it resumes
    text = os.environ.get(constants.ENV_AGENT_PID, "")
    agent = int(text) if text.isdigit() else 0
    pid = os.getpid()
    if agent and OPEN_EVIDENCE is not None and (_evidence is None or _evidence[0] != pid):
        with contextlib.suppress(OSError, RuntimeError):  # without descriptors or threads it gives none
            _evidence = (pid, *OPEN_EVIDENCE(count_collectives))
    _, stacks_fd, request_fd = _evidence or (0, 0, 0)
    generation = assigned_generation()
    return WorkerProcess(rank, agent, generation, pid, read_start_ticks(os.getpid()), stacks_fd, request_fd)


def count_collectives() -> int:
    """Count the default group's collectives; 0 if unknown. Called several times a step."""
    try:
        # Not a public attribute; a group of several backends lacks it.
        return int(getattr(dist.group.WORLD, "_get_sequence_number_for_group", int)())
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return 0
