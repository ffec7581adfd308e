"""Where the workers of this node stand: the stacks of all their threads, and what the kernel says of them.

Works for a process that is stopped, whose GIL is held or that sleeps in the kernel: what does not answer is
described from outside. A number is never taken for a process: every look and every signal is for the one
that started at the time which its line tells.

Promise: takes less than three seconds, whatever the processes do, and leaves nothing behind. One that was
stopped runs for a moment, since a stopped process tells nothing: whoever asks means to end it.

Does not know who is to blame (`policy/blame.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_resume.policy.hangs import PendingCollective, RankEvidence, StackFrame
from elastic_resume.snapshot.progress_page import STACKS_SIGNAL, ProgressRecord

ANSWER_TIMEOUT_S = 0.5  # a healthy interpreter hands its GIL over after 5 ms, to each of its threads
STACKS_TIMEOUT_S = 0.6
MIN_CPU_SAMPLE_S = 0.05  # of looking at the time that a process uses
POLL_INTERVAL_S = 0.005
MAX_STACK_BYTES = 128 * 1024  # of one rank: faulthandler writes at most 100 threads of 100 levels
MAX_CHILDREN = 20
_STACKS_MEMFD = "/memfd:elastic_resume-stacks"
_FRAME_PATTERN = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD_PATTERN = re.compile(r"^(Current thread|Thread) 0x")
_STATUS_FIELDS = ("Name", "State", "Threads", "VmRSS", "SigPnd", "ShdPnd", "voluntary_ctxt_switches")


@dataclass(frozen=True)
class RankState:
    """One rank: the evidence, and all that a person may want to read."""

    line: ProgressRecord
    evidence: RankEvidence
    text: str


def is_alive(line: ProgressRecord) -> bool:
    """Whether the process of that line lives; one that has ended and was not collected yet does not."""
    stat = _sample_process(line)
    return stat is not None and stat.state not in {"Z", "X"}


def kill(line: ProgressRecord) -> bool:
    """SIGKILL the process of that line, and no other; tell whether it was there."""
    return _send_signal(line, signal.SIGKILL)


def collect_rank_states(
    lines: Sequence[ProgressRecord], is_stalled: Callable[[ProgressRecord], bool]
) -> list[RankState]:
    """Ask all ranks at once where they stand. ``stands`` tells whether a rank has not gone on either."""
    asked = [_RankQuery(line) for line in lines]
    began = time.monotonic()
    for one in asked:
        one.send()
    # Before the signal, which ends a native call that holds the GIL: it would answer then.
    _wait_until(ANSWER_TIMEOUT_S, lambda: all([one.poll_answer() or not one.can_answer for one in asked]))  # noqa: C419 - ask each
    # To ask one that is stopped, or in a native call, may set it going, and those that wait for it with it.
    _request_stacks([one for one in asked if one.answered])
    _request_stacks([one for one in asked if not one.answered])
    for one in asked:
        one.stop_again()
    time.sleep(max(0.0, MIN_CPU_SAMPLE_S - (time.monotonic() - began)))
    try:
        return [one.build_state(is_stalled(one.line)) for one in asked]
    finally:
        for one in asked:
            one.close()


@dataclass(frozen=True)
class _ProcessSample:
    state: str
    cpu_ns: int
    taken_at_ns: int


@dataclass
class _RankQuery:
    """One worker while it is asked."""

    line: ProgressRecord
    first_sample: _ProcessSample | None = None
    stacks_file: int = -1
    stacks_offset: int = 0
    is_sent: bool = False
    answered: bool = False
    signalled: bool = False
    output: str = ""
    _last_size: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        self.first_sample = _sample_process(self.line)
        if self.first_sample is not None and self.line.worker.stack_output_fd > 0:
            with contextlib.suppress(OSError):
                self.stacks_file = _open_worker_descriptor(
                    self.line, self.line.worker.stack_output_fd, _STACKS_MEMFD, os.O_RDONLY
                )
                self.stacks_offset = os.fstat(self.stacks_file).st_size

    @property
    def can_answer(self) -> bool:
        """Whether there is something to wait for: a stopped process answers when it goes on."""
        return (
            self.is_sent
            and self.first_sample is not None
            and self.first_sample.state not in {"T", "t", "Z", "X", "D"}
        )

    def send(self) -> None:
        """Ask its Python."""
        if self.stacks_file < 0:
            return
        with contextlib.suppress(OSError):
            bell = _open_worker_descriptor(
                self.line, self.line.worker.stack_request_fd, "pipe:", os.O_WRONLY | os.O_NONBLOCK
            )
            try:
                self.is_sent = os.write(bell, b"?") == 1
            finally:
                os.close(bell)

    def poll_answer(self) -> bool:
        """Whether its Python has answered."""
        if not self.answered:
            self._read_output()
            self.answered = _find_answer(self.output) is not None
        return self.answered

    def request_stacks(self) -> None:
        """Have the interpreter write the stacks of all threads, if it has promised to heed the signal."""
        if self.stacks_file < 0 or self.first_sample is None or not _handles_stacks_signal(self.line):
            return
        self.signalled = _send_signal(self.line, STACKS_SIGNAL)
        if self.first_sample.state == "T":  # the signal is heard only now
            _send_signal(self.line, signal.SIGCONT)

    def stop_again(self) -> None:
        """Stop again what was stopped: it is to be ended, and not to go on half way."""
        if self.signalled and self.first_sample is not None and self.first_sample.state == "T":
            _send_signal(self.line, signal.SIGSTOP)

    @property
    def has_all_stacks(self) -> bool:
        """Whether all is there that will come: it has not grown since the last look."""
        if not self.signalled:
            return True
        self._read_output()
        grown, self._last_size = len(self.output) != self._last_size, len(self.output)
        return not grown and _THREAD_PATTERN.search(_extract_stacks(self.output)) is not None

    def _read_output(self) -> None:
        if self.stacks_file >= 0:
            with contextlib.suppress(OSError):
                self.output = os.pread(self.stacks_file, MAX_STACK_BYTES, self.stacks_offset).decode(
                    "utf-8", "replace"
                )

    def build_state(self, is_stalled: bool) -> RankState:
        """Put together what is known."""
        line, before, after = self.line, self.first_sample, _sample_process(self.line)
        # An answer that came later tells of what the question for stacks set going.
        answer = _find_answer(self.output) if self.answered else None
        stacks = _extract_stacks(self.output)
        state = _choose_state(before, after)
        collectives, pending = (None, None) if answer is None else _parse_answer(answer)
        evidence = RankEvidence(
            rank=line.worker.rank,
            local_rank=line.local_rank,
            process_state=state,
            step=line.step,
            num_collectives=line.collectives if collectives is None else collectives,
            python_responded=self.answered if self.can_answer else None,
            pending_collectives=pending,
            frames=parse_main_thread(stacks),
            cpu_share=_cpu_share(before, after),
            kernel_function=_read_proc_line(line, "wchan"),
            is_stalled=is_stalled or state in {"", "Z", "X"},
            is_finished=line.last_progress_ns == 0,
        )
        return RankState(line, evidence, _format_state(line, evidence, stacks))

    def close(self) -> None:
        """Give the file back."""
        if self.stacks_file >= 0:
            os.close(self.stacks_file)
            self.stacks_file = -1


def _request_stacks(queries: Sequence[_RankQuery]) -> None:
    for one in queries:
        one.request_stacks()
    _wait_until(STACKS_TIMEOUT_S, lambda: all([one.has_all_stacks for one in queries]))  # noqa: C419 - ask each


def parse_main_thread(stacks: str) -> tuple[StackFrame, ...]:
    """Give the frames of the main thread, which faulthandler writes last, innermost first."""
    frames: list[StackFrame] = []
    for text in stacks.splitlines():
        level = _FRAME_PATTERN.match(text)
        if _THREAD_PATTERN.match(text):
            frames = []
        elif level:
            frames.append(StackFrame(level[1], int(level[2]), level[3]))
    return tuple(frames)


# ---- processes -----------------------------------------------------------------------------------------


def _sample_process(line: ProgressRecord) -> _ProcessSample | None:
    """Look at the process of that line; None when it has ended."""
    pid = line.worker.pid
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from field 3 on: proc(5)
        if int(fields[19]) != line.worker.start_ticks:
            return None
        ran_ns = int((_read_proc_line(line, "schedstat") or "0").split()[0])
        return _ProcessSample(fields[0], ran_ns, time.monotonic_ns())
    except (OSError, ValueError, IndexError):
        return None


def _send_signal(line: ProgressRecord, signal_number: int) -> bool:
    try:
        handle = os.pidfd_open(line.worker.pid)
    except OSError:
        return False
    try:
        if (
            _sample_process(line) is None
        ):  # asked while we hold it: the number cannot become another process's
            return False
        signal.pidfd_send_signal(handle, signal_number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _open_worker_descriptor(line: ProgressRecord, descriptor: int, link_prefix: str, flags: int) -> int:
    """Open one of the worker's own descriptors, if it still is what it was.

    Raises:
        OSError: it is not, or /proc does not let us.

    """
    path = f"/proc/{line.worker.pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(link_prefix):  # noqa: PTH115 - no path of ours
        raise OSError(f"{path} is something else by now")
    return os.open(path, flags | os.O_CLOEXEC)


def _handles_stacks_signal(line: ProgressRecord) -> bool:
    """Whether a signal handler is there: without one the signal would kill."""
    for text in _read_proc_lines(line, "status"):
        if text.startswith("SigCgt:"):
            return bool(int(text.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _choose_state(before: _ProcessSample | None, after: _ProcessSample | None) -> str:
    """Give the state that it was found in; D only where it stays, since everybody is in it at times."""
    if before is None:
        return ""
    if before.state == "D" and after is not None:
        return after.state
    return before.state


def _cpu_share(before: _ProcessSample | None, after: _ProcessSample | None) -> float:
    if before is None or after is None or after.taken_at_ns <= before.taken_at_ns:
        return 0.0
    return round((after.cpu_ns - before.cpu_ns) / (after.taken_at_ns - before.taken_at_ns), 3)


def _read_proc_lines(line: ProgressRecord, name: str) -> list[str]:
    with contextlib.suppress(OSError), open(f"/proc/{line.worker.pid}/{name}", "rb") as file:
        return file.read(16384).decode("utf-8", "replace").splitlines()
    return []


def _read_proc_line(line: ProgressRecord, name: str) -> str:
    return next(iter(_read_proc_lines(line, name)), "").strip()


def _wait_until(timeout_s: float, done: Callable[[], bool]) -> None:
    until = time.monotonic() + timeout_s
    while not done() and time.monotonic() < until:
        select.select([], [], [], POLL_INTERVAL_S)


# ---- what it says --------------------------------------------------------------------------------------


def _find_answer(output: str) -> dict[str, object] | None:
    for text in output.splitlines():
        if text.startswith('{"collectives"'):
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(text)
                return answer if isinstance(answer, dict) else None
    return None


def _extract_stacks(output: str) -> str:
    return "\n".join(text for text in output.splitlines() if text and not text.startswith('{"'))


def _parse_answer(answer: dict[str, object]) -> tuple[int | None, tuple[PendingCollective, ...] | None]:
    """Read an answer; what is not as it should be is left out."""
    number, listed = answer.get("collectives"), answer.get("pending")
    pending = None
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if isinstance(listed, list):
            pending = tuple(
                PendingCollective(int(one["number"]), str(one["name"]), str(one["group"]), str(one["sizes"]))
                for one in listed
            )
    return number if type(number) is int and number > 0 else None, pending


def _format_state(line: ProgressRecord, evidence: RankEvidence, stacks: str) -> str:
    """Write the rank's part of the report."""
    worker = line.worker
    told = [
        f"rank {worker.rank} (local rank {line.local_rank}, process {worker.pid}), finished step {line.step}",
        f"  kernel: state {evidence.process_state or 'ended'}, {evidence.cpu_share:.0%} of a core",
    ]
    if evidence.pending_collectives:
        told += [
            f"  collective begun and not ended: {one} {one.sizes}".rstrip()
            for one in evidence.pending_collectives
        ]
    elif evidence.pending_collectives is not None:
        told.append("  collectives: none is under way")
    else:
        told.append("  collectives: torch's flight recorder could not be asked")
    told.append(f"  collectives of the default group so far: {evidence.num_collectives or 'not known'}")
    if evidence.python_responded is False:
        told.append(f"  its Python did not answer within {ANSWER_TIMEOUT_S:g} s: something holds the GIL")
    for name in ("wchan", "syscall", "stack"):
        told += [f"  {name}: {text}" for text in _read_proc_lines(line, name)[:20]]
    told += [
        f"  {text}" for text in _read_proc_lines(line, "status") if text.partition(":")[0] in _STATUS_FIELDS
    ]
    told += _describe_children(worker.pid)
    told.append("  Python stacks, innermost level first:" if stacks else "  no Python stack could be had")
    told += [f"    {text}" for text in stacks.splitlines()]
    return "\n".join(told)


def _describe_children(pid: int) -> list[str]:
    """Name the processes that it has started: a DataLoader's workers, say."""
    with contextlib.suppress(OSError, ValueError):
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        told = []
        for child in found[:MAX_CHILDREN]:
            with contextlib.suppress(OSError):
                before, _, after = Path(f"/proc/{child}/stat").read_text().rpartition(")")
                wchan = Path(f"/proc/{child}/wchan").read_text()
                told.append(
                    f"  child {child} {before.partition('(')[2]}: state {after.split()[0]}, in {wchan}"
                )
        return told
    return []
