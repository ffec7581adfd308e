"""Record a worker's progress for the hang detector, and answer its requests for evidence.

`RankHeartbeat` writes this rank's record. Under an agent each worker can also be examined in two ways:

- A thread waits for a byte in a pipe, and answers with the collectives in which this rank takes part. It
  needs the GIL: without an answer, something holds the GIL.
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
from typing import Any

import torch.distributed as dist

from elastic_resume import constants
from elastic_resume.ranks.rank_context import RankContext, assigned_generation
from elastic_resume.slots.progress_page import STACKS_SIGNAL, ProgressPage, WorkerProcess, read_start_ticks

MAX_PENDING_COLLECTIVES = 8  # limit of collectives in one answer, oldest first


class RankHeartbeat:
    """This rank's record on the progress page, in one generation."""

    def __init__(self, progress_page: ProgressPage, context: RankContext) -> None:
        self._progress_page = progress_page
        self._context = context
        self._local_rank = context.local_rank
        self._count_collectives = get_collective_counter()
        self._pid = os.getpid()
        self._busy_depth = 0
        self._lock = threading.Lock()  # several threads of the script may be busy

    def start_generation(self, generation: int, step: int) -> None:
        """Record the start of ``generation`` at ``step``. Hang detection begins after its first step."""
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
        self._progress_page.finish_step(self._local_rank, step, self._count_collectives())

    def set_own_time(self, median_us: int) -> None:
        """Record the median of this rank's newest own times; 0 if it is unknown."""
        self._progress_page.set_own_time(self._local_rank, median_us)

    def end_epoch(self, step: int) -> None:
        """Record that ``step`` was an epoch's last one; an evaluation may follow."""
        self._progress_page.end_epoch(self._local_rank, step)

    @contextlib.contextmanager
    def idle_afterwards(self) -> Iterator[None]:
        """Pause hang detection when the block ends, until this rank finishes another step."""
        try:
            yield
        finally:
            self._set_idle()

    def close(self) -> None:
        """Record that no further step follows, and release the process group."""
        self._count_collectives = _count_none
        self._set_idle()

    @contextlib.contextmanager
    def busy(self, limit_s: float = 0.0) -> Iterator[None]:
        """Pause hang detection for a long operation that is not a step. Blocks may be nested.

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


def get_collective_counter() -> Callable[[], int]:
    """Return a function that counts the default group's collectives; a call takes 0.3 µs."""
    if not dist.is_available() or not dist.is_initialized():
        return _count_none
    # Not a public attribute; a group of several backends lacks it. Then a hang report has no count.
    count: Callable[[], int] | None = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None)
    try:
        return count if count is not None and type(count()) is int else _count_none
    except RuntimeError:
        return _count_none


def _count_none() -> int:
    return 0


# ---- answers to the hang detector ----------------------------------------------------------------------

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
    stacks_fd = os.memfd_create("elastic_resume-stacks", os.MFD_CLOEXEC)
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
            os.write(stacks_fd, b"\n" + json.dumps(describe_collectives()).encode() + b"\n")


def describe_collectives() -> dict[str, Any]:
    """Return the number of ``collectives`` started in the default group, and the ``pending`` ones.

    Each pending collective has a number, name, group and sizes. ``pending`` is None without torch's flight
    recorder.
    """
    answer: dict[str, Any] = {"collectives": get_collective_counter()(), "pending": None}
    c10d = sys.modules.get("torch._C._distributed_c10d")  # a private module that not every build has
    nccl_dump: Callable[[], bytes] | None = getattr(c10d, "_dump_nccl_trace_json", None)
    dump: Callable[[], bytes] | None = getattr(c10d, "_dump_fr_trace_json", nccl_dump)
    with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        if dump is not None:
            entries = json.loads(dump()).get("entries", [])
            if entries:  # there are no entries if the recorder is off
                pending = [_describe_pending(entry) for entry in entries if not entry["retired"]]
                answer["pending"] = pending[:MAX_PENDING_COLLECTIVES]
    return answer


def _describe_pending(entry: dict[str, Any]) -> dict[str, Any]:
    name = str(entry["profiling_name"])
    return {
        "number": int(entry["p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"]),
        "name": (name.partition(":")[2] or name)[:100],
        "group": " ".join(map(str, entry["process_group"]))[:100],
        "sizes": str(entry.get("input_sizes", ""))[:100],
    }
