"""System calls that this Python may lack.

A Python that was built with an old C library or old kernel headers (conda's, Amazon Linux 2's, former ones of
uv) has no `os.memfd_create` or `os.pidfd_open`, although the kernel has them: memfd_create(2) since 3.17,
pidfd_send_signal(2) since 5.1, pidfd_open(2) since 5.3. The numbers are those of the kernel's tables.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
from typing import Any

MFD_CLOEXEC, MFD_ALLOW_SEALING, MFD_NOEXEC_SEAL = 0x1, 0x2, 0x8  # from linux/memfd.h
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "ppc64le": 360, "s390x": 350, "riscv64": 279}
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # on every architecture
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_LIBC = ctypes.CDLL(None)


def memfd_create(name: str, flags: int) -> int:
    """Make an unnamed file in memory, and return its descriptor.

    Raises:
        OSError: the kernel refuses, or has no such call.

    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    number = _MEMFD_CREATE.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, "this Python has no os.memfd_create")
    return _call(number, ctypes.c_char_p(name.encode()), ctypes.c_uint(flags))


def create_anonymous_file(name: str, *, may_seal: bool = False) -> int:
    """Make an unnamed file in memory that is not executable: hardened kernels refuse others (memfd_noexec=2).

    Raises:
        OSError: see `memfd_create`.

    """
    flags = MFD_CLOEXEC | (MFD_ALLOW_SEALING if may_seal else 0)
    try:
        return memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError:  # Linux before 6.3 lacks the flag
        return memfd_create(name, flags)


def name_descriptor(descriptor: int) -> str:
    """Return a path by which other processes can open this process's descriptor while it is open.

    torchelastic passes no descriptors on, so what an agent shares with the processes below has such a name.
    """
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def pidfd_open(pid: int) -> int:
    """Return a descriptor of a process. Raise OSError if it has ended, or if the kernel has no such call."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def pidfd_send_signal(descriptor: int, number: int) -> None:
    """Send a signal to the process of a descriptor. Raise OSError if it has ended."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(descriptor, number)
        return
    _call(_PIDFD_SEND_SIGNAL, ctypes.c_int(descriptor), ctypes.c_int(number), None, ctypes.c_uint(0))


def die_with_parent(parent: int | None = None, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread ends that made it.

    Call it between fork and exec, or first of all. Given its ``parent``, a process whose parent has ended
    before the kernel watched it exits with code 1.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _call(number: int, *arguments: Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if number != _PIDFD_SEND_SIGNAL:
        os.set_inheritable(result, False)
    return result
