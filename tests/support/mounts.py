"""Make detached mounts and loop devices with system calls that Python lacks.

A detached mount is in no namespace and ends with its last descriptor. As a program (``python -I -S mounts.py
NAMESPACE TARGET MOUNT``) it moves a mount into another mount namespace, for which a process must have no
threads. It uses the standard library only.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# System calls with one number on every architecture; arguments as in linux/mount.h and linux/loop.h.
_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 429, 430, 431, 432
_CLOEXEC, _SET_FLAG, _SET_STRING, _CREATE, _FROM_EMPTY_PATH = 1, 0, 1, 6, 4
_AT_FDCWD, _MNT_DETACH = -100, 2
_LOOP_GET_FREE, _LOOP_CONFIGURE, _LOOP_AUTOCLEAR, _LOOP_MAJOR = 0x4C82, 0x4C0A, 4, 7
_LOOP_CONFIG_BYTES, _LOOP_FLAGS_AT = 304, 60
_MAX_ATTEMPTS = 100
_LIBC = ctypes.CDLL(None, use_errno=True)


def make_detached_mount(file_system: str, options: Mapping[str, str]) -> int:
    """Mount a file system in no namespace; return its descriptor. An option "" is a flag.

    Raises:
        OSError: with the kernel's messages.

    """
    context = _syscall("fsopen", _FSOPEN, file_system.encode(), _CLOEXEC)
    try:
        for name, value in options.items():
            verb = (_SET_STRING, name.encode(), value.encode()) if value else (_SET_FLAG, name.encode(), None)
            _syscall(f"option {name} of {file_system}", _FSCONFIG, context, *verb, 0)
        _syscall(f"mount of {file_system}", _FSCONFIG, context, _CREATE, None, None, 0)
        return _syscall("fsmount", _FSMOUNT, context, _CLOEXEC, 0)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}{_kernel_messages(context)}") from None
    finally:
        os.close(context)


def make_loop_device(file: int) -> int:
    """Make a block device of an open file; it ends with its last descriptor and mount."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_MAX_ATTEMPTS):
            device = _open_loop(fcntl.ioctl(control, _LOOP_GET_FREE))
            config = bytearray(_LOOP_CONFIG_BYTES)
            struct.pack_into("<I", config, 0, file)
            struct.pack_into("<I", config, _LOOP_FLAGS_AT, _LOOP_AUTOCLEAR)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, bytes(config))
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # else another was faster
                    raise
            else:
                return device
        raise OSError(errno.EBUSY, "every loop device that is free is taken by others at once")
    finally:
        os.close(control)


def enter_namespace(path: str) -> None:
    """Enter the namespace at this path; a pid namespace applies to children only."""
    space = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _LIBC.setns(space, 0):
            raise last_error("setns")
    finally:
        os.close(space)


def move_mount(namespace: str, target: str, mount: int) -> None:
    """Move a detached mount to ``target`` in the given mount namespace, replacing an earlier one.

    Only a process without threads may call this, and it stays in that namespace.
    """
    enter_namespace(namespace)
    Path(target).mkdir(parents=True, exist_ok=True)
    if Path(target).is_mount() and _LIBC.umount2(os.fsencode(target), _MNT_DETACH):
        raise last_error(f"umount of {target}")
    _syscall("move_mount", _MOVE_MOUNT, mount, b"", _AT_FDCWD, os.fsencode(target), _FROM_EMPTY_PATH)


def _open_loop(number: int) -> int:
    try:
        return os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # a container's /dev has those that were there when it was made
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "loop")
            os.mknod(place, 0o600 | 0o060000, os.makedev(_LOOP_MAJOR, number))
            return os.open(place, os.O_RDWR | os.O_CLOEXEC)


def _kernel_messages(context: int) -> str:
    """Return the kernel's messages about a failed mount."""
    words = []
    with contextlib.suppress(OSError):  # ENODATA: no more
        while True:
            words.append(os.read(context, 4096).decode(errors="replace").strip())
    return f" ({'; '.join(words)})" if words else ""


def _syscall(description: str, number: int, *arguments: object) -> int:
    done: int = _LIBC.syscall(ctypes.c_long(number), *arguments)
    if done < 0:
        raise last_error(description)
    return done


def last_error(what: str) -> OSError:
    """Return the error of the last system call."""
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        move_mount(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except OSError as failed:
        sys.exit(failed.strerror)
