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

from elastic_resume.policy.hangs import Evidence, Frame, Pending
from elastic_resume.snapshot.progress_page import STACKS_SIGNAL, Line

ANSWER_S = 0.5  # a healthy interpreter hands its GIL over after 5 ms, to each of its threads
STACKS_S = 0.6
LEAST_S = 0.05  # of looking at the time that a process uses
POLL_S = 0.005
MAX_STACK_BYTES = 128 * 1024  # of one rank: faulthandler writes at most 100 threads of 100 levels
MAX_CHILDREN = 20
_FILE_NAME = "/memfd:elastic_resume-stacks"
_LEVEL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x")
_STATUS = ("Name", "State", "Threads", "VmRSS", "SigPnd", "ShdPnd", "voluntary_ctxt_switches")


@dataclass(frozen=True)
class Standing:
    """One rank: the evidence, and all that a person may want to read."""

    line: Line
    evidence: Evidence
    text: str


def is_alive(line: Line) -> bool:
    """Whether the process of that line lives; one that has ended and was not collected yet does not."""
    stat = _stat(line)
    return stat is not None and stat.state not in {"Z", "X"}


def kill(line: Line) -> bool:
    """SIGKILL the process of that line, and no other; tell whether it was there."""
    return _send(line, signal.SIGKILL)


def gather(lines: Sequence[Line], stands: Callable[[Line], bool]) -> list[Standing]:
    """Ask all ranks at once where they stand. ``stands`` tells whether a rank has not gone on either."""
    asked = [_Asked(line) for line in lines]
    began = time.monotonic()
    for one in asked:
        one.ring()
    # Before the signal, which ends a native call that holds the GIL: it would answer then.
    _wait(ANSWER_S, lambda: all([one.hears() or not one.may_answer for one in asked]))  # noqa: C419 - ask each
    # To ask one that is stopped, or in a native call, may set it going, and those that wait for it with it.
    _ask_for_stacks([one for one in asked if one.answered])
    _ask_for_stacks([one for one in asked if not one.answered])
    for one in asked:
        one.hold()
    time.sleep(max(0.0, LEAST_S - (time.monotonic() - began)))
    try:
        return [one.standing(stands(one.line)) for one in asked]
    finally:
        for one in asked:
            one.close()


@dataclass(frozen=True)
class _Stat:
    state: str
    ran_ns: int
    at_ns: int


@dataclass
class _Asked:
    """One worker while it is asked."""

    line: Line
    before: _Stat | None = None
    file: int = -1
    start: int = 0
    rung: bool = False
    answered: bool = False
    signalled: bool = False
    said: str = ""
    _size: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        self.before = _stat(self.line)
        if self.before is not None and self.line.worker.stacks_fd > 0:
            with contextlib.suppress(OSError):
                self.file = _open(self.line, self.line.worker.stacks_fd, _FILE_NAME, os.O_RDONLY)
                self.start = os.fstat(self.file).st_size

    @property
    def may_answer(self) -> bool:
        """Whether there is something to wait for: a stopped process answers when it goes on."""
        return self.rung and self.before is not None and self.before.state not in {"T", "t", "Z", "X", "D"}

    def ring(self) -> None:
        """Ask its Python."""
        if self.file < 0:
            return
        with contextlib.suppress(OSError):
            bell = _open(self.line, self.line.worker.bell_fd, "pipe:", os.O_WRONLY | os.O_NONBLOCK)
            try:
                self.rung = os.write(bell, b"?") == 1
            finally:
                os.close(bell)

    def hears(self) -> bool:
        """Whether its Python has answered."""
        if not self.answered:
            self._read()
            self.answered = _answer_in(self.said) is not None
        return self.answered

    def ask_for_stacks(self) -> None:
        """Have the interpreter write the stacks of all threads, if it has promised to heed the signal."""
        if self.file < 0 or self.before is None or not _catches(self.line):
            return
        self.signalled = _send(self.line, STACKS_SIGNAL)
        if self.before.state == "T":  # the signal is heard only now
            _send(self.line, signal.SIGCONT)

    def hold(self) -> None:
        """Stop again what was stopped: it is to be ended, and not to go on half way."""
        if self.signalled and self.before is not None and self.before.state == "T":
            _send(self.line, signal.SIGSTOP)

    @property
    def has_stacks(self) -> bool:
        """Whether all is there that will come: it has not grown since the last look."""
        if not self.signalled:
            return True
        self._read()
        grown, self._size = len(self.said) != self._size, len(self.said)
        return not grown and _THREAD.search(_stacks_in(self.said)) is not None

    def _read(self) -> None:
        if self.file >= 0:
            with contextlib.suppress(OSError):
                self.said = os.pread(self.file, MAX_STACK_BYTES, self.start).decode("utf-8", "replace")

    def standing(self, stands: bool) -> Standing:
        """Put together what is known."""
        line, before, after = self.line, self.before, _stat(self.line)
        # An answer that came later tells of what the question for stacks set going.
        answer = _answer_in(self.said) if self.answered else None
        stacks = _stacks_in(self.said)
        state = _state(before, after)
        collectives, pending = (None, None) if answer is None else _told(answer)
        evidence = Evidence(
            rank=line.worker.rank,
            local_rank=line.local_rank,
            state=state,
            step=line.step,
            collectives=line.collectives if collectives is None else collectives,
            answered=self.answered if self.may_answer else None,
            pending=pending,
            frames=main_thread(stacks),
            cpu_share=_share(before, after),
            sleeps_in=_first_line(line, "wchan"),
            stands=stands or state in {"", "Z", "X"},
            rests=line.beat_ns == 0,
        )
        return Standing(line, evidence, _described(line, evidence, stacks))

    def close(self) -> None:
        """Give the file back."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _ask_for_stacks(asked: Sequence[_Asked]) -> None:
    for one in asked:
        one.ask_for_stacks()
    _wait(STACKS_S, lambda: all([one.has_stacks for one in asked]))  # noqa: C419 - ask each


def main_thread(stacks: str) -> tuple[Frame, ...]:
    """Give the frames of the main thread, which faulthandler writes last, innermost first."""
    frames: list[Frame] = []
    for text in stacks.splitlines():
        level = _LEVEL.match(text)
        if _THREAD.match(text):
            frames = []
        elif level:
            frames.append(Frame(level[1], int(level[2]), level[3]))
    return tuple(frames)


# ---- processes -----------------------------------------------------------------------------------------


def _stat(line: Line) -> _Stat | None:
    """Look at the process of that line; None when it has ended."""
    pid = line.worker.pid
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from field 3 on: proc(5)
        if int(fields[19]) != line.worker.start_ticks:
            return None
        ran_ns = int((_first_line(line, "schedstat") or "0").split()[0])
        return _Stat(fields[0], ran_ns, time.monotonic_ns())
    except (OSError, ValueError, IndexError):
        return None


def _send(line: Line, number: int) -> bool:
    try:
        handle = os.pidfd_open(line.worker.pid)
    except OSError:
        return False
    try:
        if _stat(line) is None:  # asked while we hold it: the number cannot become another process's
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _open(line: Line, descriptor: int, kind: str, flags: int) -> int:
    """Open one of the worker's own descriptors, if it still is what it was.

    Raises:
        OSError: it is not, or /proc does not let us.

    """
    path = f"/proc/{line.worker.pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(kind):  # noqa: PTH115 - no path of ours
        raise OSError(f"{path} is something else by now")
    return os.open(path, flags | os.O_CLOEXEC)


def _catches(line: Line) -> bool:
    """Whether a signal handler is there: without one the signal would kill."""
    for text in _lines(line, "status"):
        if text.startswith("SigCgt:"):
            return bool(int(text.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _state(before: _Stat | None, after: _Stat | None) -> str:
    """Give the state that it was found in; D only where it stays, since everybody is in it at times."""
    if before is None:
        return ""
    if before.state == "D" and after is not None:
        return after.state
    return before.state


def _share(before: _Stat | None, after: _Stat | None) -> float:
    if before is None or after is None or after.at_ns <= before.at_ns:
        return 0.0
    return round((after.ran_ns - before.ran_ns) / (after.at_ns - before.at_ns), 3)


def _lines(line: Line, name: str) -> list[str]:
    with contextlib.suppress(OSError), open(f"/proc/{line.worker.pid}/{name}", "rb") as file:
        return file.read(16384).decode("utf-8", "replace").splitlines()
    return []


def _first_line(line: Line, name: str) -> str:
    return next(iter(_lines(line, name)), "").strip()


def _wait(limit_s: float, done: Callable[[], bool]) -> None:
    until = time.monotonic() + limit_s
    while not done() and time.monotonic() < until:
        select.select([], [], [], POLL_S)


# ---- what it says --------------------------------------------------------------------------------------


def _answer_in(said: str) -> dict[str, object] | None:
    for text in said.splitlines():
        if text.startswith('{"collectives"'):
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(text)
                return answer if isinstance(answer, dict) else None
    return None


def _stacks_in(said: str) -> str:
    return "\n".join(text for text in said.splitlines() if text and not text.startswith('{"'))


def _told(answer: dict[str, object]) -> tuple[int | None, tuple[Pending, ...] | None]:
    """Read an answer; what is not as it should be is left out."""
    number, listed = answer.get("collectives"), answer.get("pending")
    pending = None
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if isinstance(listed, list):
            pending = tuple(
                Pending(int(one["number"]), str(one["name"]), str(one["group"]), str(one["sizes"]))
                for one in listed
            )
    return number if type(number) is int and number > 0 else None, pending


def _described(line: Line, evidence: Evidence, stacks: str) -> str:
    """Write the rank's part of the report."""
    worker = line.worker
    told = [
        f"rank {worker.rank} (local rank {line.local_rank}, process {worker.pid}), finished step {line.step}",
        f"  kernel: state {evidence.state or 'ended'}, {evidence.cpu_share:.0%} of a core",
    ]
    if evidence.pending:
        told += [f"  collective begun and not ended: {one} {one.sizes}".rstrip() for one in evidence.pending]
    elif evidence.pending is not None:
        told.append("  collectives: none is under way")
    else:
        told.append("  collectives: torch's flight recorder could not be asked")
    told.append(f"  collectives of the default group so far: {evidence.collectives or 'not known'}")
    if evidence.answered is False:
        told.append(f"  its Python did not answer within {ANSWER_S:g} s: something holds the GIL")
    for name in ("wchan", "syscall", "stack"):
        told += [f"  {name}: {text}" for text in _lines(line, name)[:20]]
    told += [f"  {text}" for text in _lines(line, "status") if text.partition(":")[0] in _STATUS]
    told += _children(worker.pid)
    told.append("  Python stacks, innermost level first:" if stacks else "  no Python stack could be had")
    told += [f"    {text}" for text in stacks.splitlines()]
    return "\n".join(told)


def _children(pid: int) -> list[str]:
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
