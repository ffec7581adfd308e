"""Record a worker's progress for its agent, and answer the agent's requests for evidence.

`RankHeartbeat` writes this rank's record. Under an agent each worker can also be examined in two ways:

- A thread waits for a byte in a pipe, and answers with the number of collectives, then with torch's flight
  recorder. It needs the GIL: without an answer, something holds the GIL.
- `STACKS_SIGNAL` makes faulthandler write the stacks of all threads without the GIL, even from a blocked
  native call.

Both write into a memfd, so a hanging disk hides nothing and no file is left behind. Without a request there
is no cost.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate, takewhile
from typing import Any

import torch.distributed as dist

from elastic_resume import constants, linux
from elastic_resume.ranks.rank_context import RankContext, assigned_generation
from elastic_resume.slots.progress_page import STACKS_SIGNAL, ProgressPage, WorkerProcess, read_start_ticks

# NCCL has a recorder of its own; torch 2.15 also keeps those of its newer NCCL backends apart.
FLIGHT_RECORDERS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("gloo", "_dump_fr_trace_json", {}),
    ("nccl", "_dump_nccl_trace_json", {}),
    *((name, "_dump_fr_trace_json", {"backend": name}) for name in ("nccl2", "nccl-lazy")),
)
MAX_ENTRIES_BYTES = 512 * 1024  # of one recorder: about 1,000 entries, as many as CUDA queues kernels
MAX_FIELD_BYTES = 64 * 1024

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


# ---- answers to the agent ------------------------------------------------------------------------------

_responder: tuple[int, int, int] | None = None  # (pid of the process that answers, its memfd, its pipe)


def _describe_worker(rank: int) -> WorkerProcess:
    """Describe this process; under an agent start the thread that answers."""
    global _responder  # noqa: PLW0603 - one thread per process, however often it resumes
    text = os.environ.get(constants.ENV_AGENT_PID, "")
    agent = int(text) if text.isdigit() else 0
    pid = os.getpid()
    if agent and (_responder is None or _responder[0] != pid):
        with contextlib.suppress(OSError, RuntimeError):  # without descriptors or threads it cannot answer
            _responder = (pid, *_start_responder())
    _, stacks_fd, request_fd = _responder or (0, 0, 0)
    generation = assigned_generation()
    return WorkerProcess(rank, agent, generation, pid, read_start_ticks(os.getpid()), stacks_fd, request_fd)


def _start_responder() -> tuple[int, int]:
    """Create the memfd for answers and start the thread; return the memfd and the pipe's writing end."""
    stacks_fd = linux.create_anonymous_file("elastic_resume-stacks")
    fcntl.fcntl(stacks_fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True, chain=False)
    read_fd, write_fd = os.pipe()
    threading.Thread(
        target=_serve_requests, args=(read_fd, stacks_fd), name="elastic-resume-answers", daemon=True
    ).start()
    return stacks_fd, write_fd


def _serve_requests(request_fd: int, stacks_fd: int) -> None:
    with contextlib.suppress(OSError):  # the script has closed all descriptors
        while os.read(request_fd, 64):
            _write_answer(stacks_fd, {"collectives": count_collectives()})
            # Second: reading 20,000 entries takes a second, and longer if a CUDA device does not respond.
            _write_answer(stacks_fd, {"flight_recorder": dump_flight_recorders()})


def count_collectives() -> int:
    """Count the default group's collectives; 0 if unknown. Called several times a step."""
    try:
        # Not a public attribute; a group of several backends lacks it.
        return int(getattr(dist.group.WORLD, "_get_sequence_number_for_group", int)())
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return 0


def _write_answer(stacks_fd: int, answer: dict[str, Any]) -> None:
    os.write(stacks_fd, b"\n" + json.dumps(answer).encode() + b"\n")


def dump_flight_recorders() -> dict[str, Any]:
    """Return the newest entries of each of torch's flight recorders that has any."""
    c10d = sys.modules.get("torch._C._distributed_c10d")  # a private module that not every build has
    found = {}
    for name, function, options in FLIGHT_RECORDERS:
        dump: Callable[..., bytes] | None = getattr(c10d, function, None)
        with contextlib.suppress(RuntimeError, ValueError, TypeError, AttributeError):  # an older torch
            trace = json.loads(dump(**options)) if dump is not None else {}
            if trace.get("entries"):
                found[name] = _keep_newest(trace)
    return found


def _keep_newest(trace: dict[str, Any]) -> dict[str, Any]:
    """Drop the oldest entries beyond `MAX_ENTRIES_BYTES`, and other fields beyond `MAX_FIELD_BYTES`."""
    entries = trace.pop("entries")
    lengths = accumulate(len(json.dumps(entry)) for entry in reversed(entries))
    first = len(entries) - sum(1 for _ in takewhile(MAX_ENTRIES_BYTES.__ge__, lengths))
    kept = {name: value for name, value in trace.items() if len(json.dumps(value)) <= MAX_FIELD_BYTES}
    return {**kept, "entries": entries[first:]}
