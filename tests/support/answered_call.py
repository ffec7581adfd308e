"""Run a command for which the kernel answers one system call without doing it, as some file systems do.

    python answered_call.py flock ENOLCK COMMAND...
    python answered_call.py flock 0 COMMAND...      # "done", though nothing was done
    python answered_call.py flock 0 -m MODULE...    # in this process, which may have been forked

A seccomp filter does it, so it holds for all processes that the command starts. x86-64 and arm64.
"""

import ctypes
import errno
import os
import runpy
import struct
import sys

NUMBERS = {"flock": {"x86_64": 73, "aarch64": 32}}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
_RETURN_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h


class _Program(ctypes.Structure):
    """The struct sock_fprog of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def answer_call(call: str, answer: int) -> None:
    """Answer a system call of this process and its children with an errno; 0 is success."""
    instructions = [
        (_LOAD, 0, 0, 0),  # the number of the call
        (_JUMP_IF_EQUAL, 0, 1, NUMBERS[call][os.uname().machine]),
        (_RETURN, 0, 0, _RETURN_ERRNO | answer),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    program = _Program(len(instructions), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    answer_call(sys.argv[1], getattr(errno, sys.argv[2], 0))
    if sys.argv[3] == "-m":
        sys.argv[:] = sys.argv[4:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606
