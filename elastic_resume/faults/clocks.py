"""Wall clocks that jump: a process that runs is given another time of day, for real and unprepared.

Linux has no namespace for this clock, setting the host's own would hit everybody, and a preloaded library
must be there from a process's start (libfaketime 0.9.10 also breaks Python's `time.sleep`: EINVAL). But who
asks for the time calls the vDSO, code that the kernel maps into each process. Here the functions of that are
replaced, in the process's own copy, by ones that ask the kernel and add a number of seconds: clock_gettime
for CLOCK_REALTIME and its coarse twin, gettimeofday, time. So Python, C and torch see the jump alike, and
what the process forks from then on inherits it. CLOCK_MONOTONIC and all others stay true.

**Promises.** Nothing but that process is changed, and nothing is left when it ends. A clock may be set again
at any time. While code is replaced the process stands still, for milliseconds, and none of its threads is
within what is replaced. One that was stopped stays so.

**Does not know** nodes. Linux on x86-64. A program that the process executes begins with the true time; the
times of files are the kernel's, as on a file server. Any clock then takes a system call, 1 us for 0.1 here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from elastic_resume.errors import MachineError, UsageError

MOST_S = 1 << 31
_MARK = b"ER clock"
_ROOM = 192  # at the end of the vDSO's last page, which no section fills
_CODE_AT = 16  # behind the mark and the number of seconds
_ENTRY = 8  # bytes of a function that are replaced
_STAND_S = 10.0  # for who sleeps in the kernel, on a slow disk
_TRIES = 100
_LOOK_S = 0.0005
# Two bytes and a distance behind "mov rcx, [rip+…]" or "add rax, [rip+…]" lead to the number.
_FUNCTIONS = {
    "__vdso_clock_gettime": (
        "b8e4000000 0f05"  # mov eax, 228; syscall
        "85c0 7513"  # test eax, eax; jnz end
        "85ff 7405"  # test edi, edi; jz add          CLOCK_REALTIME
        "83ff05 750a"  # cmp edi, 5; jne end            CLOCK_REALTIME_COARSE
        "488b0d{seconds} 48010e"  # add: mov rcx, [seconds]; add [rsi], rcx
        "c3"  # end: ret
    ),
    "__vdso_gettimeofday": (
        "b860000000 0f05"  # mov eax, 96; syscall
        "85c0 750f"  # test eax, eax; jnz end
        "4885ff 740a"  # test rdi, rdi; jz end
        "488b0d{seconds} 48010f"  # mov rcx, [seconds]; add [rdi], rcx
        "c3"  # end: ret
    ),
    "__vdso_time": (
        "4889fa 31ff"  # mov rdx, rdi; xor edi, edi
        "b8c9000000 0f05"  # mov eax, 201; syscall
        "480305{seconds}"  # add rax, [seconds]
        "4885d2 7403 488902"  # test rdx, rdx; jz end; mov [rdx], rax
        "c3"  # end: ret
    ),
}


def available() -> str:
    """Why clocks cannot be set here, in words; empty when they can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return (
            f"clocks can be set on Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
        )
    start, end = _vdso(os.getpid()) or (0, 0)
    if end - start < _ROOM:
        return "this kernel gives processes no vDSO (vdso=0)"
    return "" if not any(_image()[-_ROOM:]) else "this kernel's vDSO has no room for it"


def set_ahead(pid: int, seconds: int) -> None:
    """Let a process's wall clock be so many seconds ahead of the true one (behind it: negative).

    Raises:
        ProcessLookupError: the process has ended.
        UsageError: so many seconds are no time of day.
        MachineError: it may not be touched, or does not come to stand, and why.

    """
    if abs(seconds) > MOST_S:
        raise UsageError(f"a clock that is {seconds} s ahead: at most {MOST_S} s, either way.")
    why = available()
    if why:
        raise MachineError(f"the clock of process {pid} cannot be set: {why}.")
    if pid == os.getpid():
        raise UsageError("a process does not set its own clock.")
    place = _vdso(pid)
    if place is None:
        raise ProcessLookupError(pid, "it has ended")
    start, end = place
    room = end - _ROOM
    number = seconds.to_bytes(8, "little", signed=True)
    try:
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            there = os.pread(memory.fileno(), end - start, start)
            if there[-_ROOM:].startswith(_MARK):
                os.pwrite(memory.fileno(), number, room + len(_MARK))
                return
            if there != _image():
                raise MachineError(f"the clock of process {pid} cannot be set: its vDSO is another one.")
            code, entries = _code(end - start)
            replaced = [range(start + at + 1, start + at + _ENTRY) for at in entries]
            with _standing(pid, replaced):
                os.pwrite(memory.fileno(), _MARK + number + code, room)
                for at, jump in entries.items():
                    os.pwrite(memory.fileno(), jump, start + at)
    except FileNotFoundError:
        raise ProcessLookupError(pid, "it has ended") from None
    except OSError as error:
        raise MachineError(f"the clock of process {pid} cannot be set: {error.strerror}.") from error


@contextlib.contextmanager
def _standing(pid: int, shunned: Collection[range]) -> Iterator[None]:
    """Have a process stand, with no thread about to go on in one of these ranges, and then go on."""
    was_stopped = _is_stopping(pid)
    for _ in range(_TRIES):
        if not was_stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            where = _wait_where(pid)
            if not any(at in each for at in where for each in shunned):
                yield
                return
        finally:
            if not was_stopped:
                os.kill(pid, signal.SIGCONT)
        time.sleep(_LOOK_S)
    raise MachineError(f"the clock of process {pid} cannot be set: a thread of it stands where it is read.")


def _is_stopping(pid: int) -> bool:
    """Whether a process stands, or was told to and has not come to: it is not to go on for our sake."""
    told = "".join(_of_threads(pid, "status")).splitlines()
    pending = [int(line.split()[1], 16) for line in told if line.startswith(("SigPnd:", "ShdPnd:"))]
    if any(signals >> (signal.SIGSTOP - 1) & 1 for signals in pending):
        return True
    # Asked second: who takes the signal is in the state of one that has stopped before it is not pending.
    return bool(_states(pid) & {"T", "t"})


def _states(pid: int) -> set[str]:
    return {line.rpartition(") ")[2][:1] for line in _of_threads(pid, "stat")}


def _wait_where(pid: int) -> list[int]:
    """Where the threads of a process that was told to stand go on, when they do."""
    deadline = time.monotonic() + _STAND_S
    while True:
        where = _where(pid)
        if where is not None:
            return where
        if time.monotonic() > deadline:
            raise MachineError(f"the clock of process {pid} cannot be set: it does not come to stand.")
        time.sleep(_LOOK_S)


def _where(pid: int) -> list[int] | None:
    """Where the threads of a process that stands go on; None: it does not.

    When one has stopped, the others have been told to: none that is in the kernel goes on from there.
    """
    states = _states(pid)
    if states <= {"Z", "X"}:
        raise ProcessLookupError(pid, "it has ended")
    if not states & {"T", "t"}:
        return None
    told = [line.split() for line in _of_threads(pid, "syscall")]  # linux/proc.rst: the last word is where
    if any(words == ["running"] for words in told):
        return None
    return [int(words[-1], 16) for words in told if words]


def _of_threads(pid: int, name: str) -> list[str]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found.append((thread / name).read_text())
    return found


def _code(size: int) -> tuple[bytes, dict[int, bytes]]:
    """The functions' code, and for each the place in the vDSO and the eight bytes that lead to it."""
    code, entries = b"", {}
    room = size - _ROOM
    library = ctypes.CDLL("linux-vdso.so.1")
    start, _ = _vdso(os.getpid()) or (0, 0)
    for name, text in _FUNCTIONS.items():
        begin = room + _CODE_AT + len(code)
        before = bytes.fromhex(text.partition("{")[0])
        distance = room + len(_MARK) - (begin + len(before) + 4)
        code += bytes.fromhex(text.format(seconds=distance.to_bytes(4, "little", signed=True).hex()))
        at = (ctypes.cast(library[name], ctypes.c_void_p).value or 0) - start
        jump = b"\xe9" + (begin - (at + 5)).to_bytes(4, "little", signed=True)
        entries[at] = jump + _image()[at + len(jump) : at + _ENTRY]
    return code, entries


def _image() -> bytes:
    """The vDSO as the kernel made it: this process's own, whose clock is never set."""
    start, end = _vdso(os.getpid()) or (0, 0)
    return ctypes.string_at(start, end - start)


def _vdso(pid: int) -> tuple[int, int] | None:
    """Where a process has its vDSO; None where it has none."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    for line in lines:
        if line.endswith("[vdso]"):
            start, end = line.split()[0].split("-")
            return int(start, 16), int(end, 16)
    return None
