"""A worker's signs of life for the agent that looks for hangs: its line on the board, its stacks when asked.

Under an agent every worker that calls ``er.resume`` can be asked in two ways where it stands. A thread
waits for a byte in a pipe and answers with the collectives that this rank takes part in, which needs the
GIL: no answer means that something holds it. And `STACKS_SIGNAL` makes the interpreter write the stacks of
all threads without the GIL, from within a blocked native call too. Both write into an anonymous file in
memory, so a disk that hangs hides nothing and nothing is left behind.

Costs nothing while nobody asks. Knows neither who asks nor what becomes of the answer.
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
from pathlib import Path
from typing import Any

import torch.distributed as dist

from elastic_resume import constants
from elastic_resume.restore.rank_context import RankContext
from elastic_resume.snapshot.progress_page import STACKS_SIGNAL, ProgressPage, WorkerProcess

MAX_PENDING_COLLECTIVES = 8  # collectives that one answer tells of, the oldest first


class Heartbeat:
    """This rank's line on the board, in one generation."""

    def __init__(self, progress_page: ProgressPage, context: RankContext) -> None:
        self._progress_page = progress_page
        self._context = context
        self._local_rank = context.local_rank
        self._count_collectives = get_collective_counter()
        self._pid = os.getpid()
        self._busy_depth = 0
        self._lock = threading.Lock()  # a thread of the script may be busy beside the one that trains

    def start_generation(self, generation: int, step: int) -> None:
        """Record that this process begins ``generation`` at ``step``; a hang is seen after its first step."""
        world = self._context.collectives
        self._progress_page.start_generation(
            self._local_rank,
            generation=generation,
            step=step,
            world_size=world.size,
            worker=_describe_worker(world.rank),
        )

    def finish_step(self, step: int) -> None:
        """Record that this rank has just finished ``step``."""
        self._progress_page.finish_step(self._local_rank, step, self._count_collectives())

    def end_epoch(self, step: int) -> None:
        """Record that ``step`` was an epoch's last one: an evaluation may follow."""
        self._progress_page.end_epoch(self._local_rank, step)

    @contextlib.contextmanager
    def idle_afterwards(self) -> Iterator[None]:
        """Train; whatever the script does afterwards is no hang, until it finishes another step."""
        try:
            yield
        finally:
            self._set_idle()

    def close(self) -> None:
        """Record that no step will come any more, and let the process group go."""
        self._count_collectives = _count_none
        self._set_idle()

    @contextlib.contextmanager
    def busy(self, limit_s: float = 0.0) -> Iterator[None]:
        """Do something long that is not a step; no hang is seen meanwhile. May be nested.

        ``limit_s``: see `Board.set_busy`. That of the outermost holds.
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
        if os.getpid() == self._pid:  # not of a forked child, which tidies up what it has a copy of
            self._progress_page.set_idle(self._local_rank)


def get_collective_counter() -> Callable[[], int]:
    """Give a way to ask for the number of collectives of the default process group, 0.3 µs a time."""
    if not dist.is_available() or not dist.is_initialized():
        return _count_none
    # No public name; without it a report says less. Groups of several backends have no number of their own.
    count: Callable[[], int] | None = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None)
    try:
        return count if count is not None and type(count()) is int else _count_none
    except RuntimeError:
        return _count_none


def _count_none() -> int:
    return 0


# ---- answering -----------------------------------------------------------------------------------------

_responder: tuple[int, int, int] | None = None  # the process that answers, its file and its bell


def _describe_worker(rank: int) -> WorkerProcess:
    """Say who we are; under an agent be ready to be asked."""
    global _responder  # noqa: PLW0603 - a process answers once, however often it resumes
    agent, this_round = (
        int(text) if text.isdigit() else 0
        for text in (os.environ.get(constants.ENV_AGENT_PID, ""), os.environ.get(constants.ENV_ROUND, ""))
    )
    pid = os.getpid()
    if agent and (_responder is None or _responder[0] != pid):
        with contextlib.suppress(OSError, RuntimeError):  # no descriptor or thread left: an answer less
            _responder = (pid, *_start_responder())
    _, stacks_fd, bell_fd = _responder or (0, 0, 0)
    return WorkerProcess(rank, agent, this_round, pid, _read_start_ticks(), stacks_fd, bell_fd)


def _start_responder() -> tuple[int, int]:
    """Open the file for answers, and wait for the bell in a thread; give both descriptors."""
    stacks_fd = os.memfd_create("elastic_resume-stacks", os.MFD_CLOEXEC)
    fcntl.fcntl(stacks_fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True, chain=False)
    hearing_fd, bell_fd = os.pipe()
    threading.Thread(
        target=_serve_requests, args=(hearing_fd, stacks_fd), name="elastic-resume-answers", daemon=True
    ).start()
    return stacks_fd, bell_fd


def _serve_requests(request_fd: int, stacks_fd: int) -> None:
    with contextlib.suppress(OSError):  # the script has closed descriptors that are not its own
        while os.read(request_fd, 64):
            os.write(stacks_fd, b"\n" + json.dumps(describe_collectives()).encode() + b"\n")


def describe_collectives() -> dict[str, Any]:
    """Say which collectives this rank has begun: ``collectives`` of the default group, ``pending`` ones.

    ``pending`` is null where torch's flight recorder cannot be asked. Each has a number, name, group, sizes.
    """
    told: dict[str, Any] = {"collectives": get_collective_counter()(), "pending": None}
    c10d = sys.modules.get("torch._C._distributed_c10d")  # no public name, and not in every build
    old: Callable[[], bytes] | None = getattr(c10d, "_dump_nccl_trace_json", None)
    dump: Callable[[], bytes] | None = getattr(c10d, "_dump_fr_trace_json", old)
    with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        if dump is not None:
            entries = json.loads(dump()).get("entries", [])
            if entries:  # one that is turned off remembers nothing, and has nothing to say
                told["pending"] = [_describe_pending(one) for one in entries if not one["retired"]][
                    :MAX_PENDING_COLLECTIVES
                ]
    return told


def _describe_pending(entry: dict[str, Any]) -> dict[str, Any]:
    p2p = bool(entry.get("is_p2p"))
    return {
        "number": int(entry["p2p_seq_id" if p2p else "collective_seq_id"]),
        "name": str(entry["profiling_name"]).partition(":")[2][:100] or str(entry["profiling_name"])[:100],
        "group": " ".join(map(str, entry["process_group"]))[:100],
        "sizes": str(entry.get("input_sizes", ""))[:100],
    }


def _read_start_ticks() -> int:
    """When this process started: field 22 of its stat, which follows the name in parentheses."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return 0
