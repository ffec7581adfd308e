"""The zygote: imports torch once, and forks a worker whenever a stub asks for one.

Run by the agent as ``python -u zygote.py LISTENER CONTROL AGENT SPEC PADDING``, in a session of its own; it
dies with the agent. A stub connects, sends its command, environment and standard streams, and gets a guard
(`guard.py`), which forks the worker::

    zygote (imports, listens)  --fork-->  guard (of one worker)  --fork-->  worker (runs the script)

Promise: in the worker all is as ``python -u script.py`` would have it, but that modules which the zygote has
imported are there: `__main__`, arguments, search path, environment, streams, signals, seeds, the end with
its exit code, atexit and threads. What an environment changes when a process or a library starts, a fork
cannot change: a stub whose environment differs there is refused, and starts its worker cold.

Promise: CUDA is not initialised here, and no Python thread runs: neither survives a fork. A module of
``--preload`` that does either, or fails, is told to the agent, which starts a zygote without it.

Does not know generations or policy. Imports only the standard library until it is told what to import.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this directory: the names in it are not for scripts

from elastic_resume.agent import guard, script

# What a plain start of a script of ours pays for: measured from sys.modules of workers in their tenth step.
# DistributedDataParallel's constructor imports torch._dynamo, 1.1 to 1.8 s.
MODULES = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.utils.data")
OURS = ("elastic_resume.worker.start",)
# Read once, by the interpreter, the loader or a library, when it starts.
START_PREFIXES = (
    "PYTHON", "LD_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LANG", "LC_",
    "TORCH_LOGS", "TORCH_SHOW", "PYTORCH_", "ELASTIC_RESUME_FAILPOINTS",
)  # fmt: skip
MAX_REQUEST = 16 << 20
REQUEST_S = 5.0
OLD_TORCH_SEED = 67280421310721  # what each process starts with where torch does not draw its first seed
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Request:
    """What a stub asks for, and the guard's line to it."""

    command: list[str]
    environ: dict[str, str]
    cwd: str
    mask: list[int]
    umask: int
    cpus: list[int]
    line: socket.socket
    streams: list[int]


class RefusedError(Exception):
    """A request cannot be served, for the reason that the text gives."""


def main() -> None:
    """Import, serve, and in a worker run its script. Returns in a worker only, at its script's end."""
    listener, control = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    agent, spec = int(sys.argv[3]), json.loads(sys.argv[4])
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != agent:
        return
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a killed guard leaves comes to us
    script.entitle(f"elastic_resume zygote of {agent}")
    script.enter(spec["command"], replace_first=False)
    environ = dict(os.environ)
    gc.disable()  # what is imported stays; collections in between cost a tenth of the time
    _import(spec["preload"], control)
    gc.collect()
    gc.freeze()  # the collector of a worker leaves these pages shared
    request = serve(listener, control, environ)
    gc.enable()
    become_worker(request)
    script.run(request.command)


def _import(preload: list[str], control: socket.socket) -> None:
    """Import what workers need; tell the agent what was left out, or which module spoils forks and exit."""
    began = time.monotonic()
    left_out = {}
    for name in [*MODULES, *OURS, *preload]:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit too
            left_out[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        spoiled = why_no_fork()
        if spoiled:
            _tell(control, {"spoiled": name, "why": spoiled})
            for child in guard.children():
                guard.kill(child)
            os._exit(1)  # an exit in good order would wait for its threads
    _tell(control, {"ready": round(time.monotonic() - began, 3), "left_out": left_out})


def why_no_fork() -> str:
    """What of this process would not survive a fork; empty when all would."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "it initialises CUDA, which does not survive a fork"
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"it starts threads ({', '.join(threads)[:200]}), which do not survive a fork"
    if guard.children():
        return "it starts processes, which workers would not have"
    return ""


def _tell(control: socket.socket, what: dict[str, Any]) -> None:
    control.sendall(json.dumps(what).encode() + b"\n")


# ---- serving -------------------------------------------------------------------------------------------


def serve(listener: socket.socket, control: socket.socket, environ: dict[str, str]) -> Request:
    """Fork a guard with a worker for each request. Returns in the workers only."""
    bell, ringer = os.pipe()
    for descriptor in (bell, ringer):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _wake)
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    poll.register(listener, select.POLLIN)
    guards: set[int] = set()
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == bell:
                os.read(bell, 4096)
                _reap(guards)
                continue
            try:
                request = receive(listener.accept()[0], environ)
            except (RefusedError, OSError, ValueError):
                continue  # the stub sees the line end and starts its worker cold
            pid = _fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number, action in (
                    (signal.SIGCHLD, signal.SIG_DFL),
                    (signal.SIGINT, signal.default_int_handler),
                ):
                    signal.signal(number, action)
                for ours in (bell, ringer):
                    os.close(ours)
                listener.close()
                control.close()
                become_guard(request)
                return request
            guards.add(pid)
            request.line.close()
            for stream in request.streams:
                os.close(stream)


def _wake(number: int, frame: object) -> None:
    """Do nothing: the signal's number is in the pipe of `set_wakeup_fd`."""


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of native threads (OpenBLAS's), which have their own way through a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _reap(guards: set[int]) -> None:
    """Collect guards that have ended, and kill what those that were killed have left to us."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            break
        guards.discard(pid)
    for orphan in set(guard.children()) - guards:
        guard.kill(orphan)


def receive(line: socket.socket, environ: dict[str, str]) -> Request:
    """Read one request.

    Raises:
        RefusedError: another user's, or its environment needs a process of its own.
        OSError, ValueError: it is torn, too long, or no request.

    """
    streams: list[int] = []
    try:
        _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        _require(uid == os.getuid(), "another user's")
        line.settimeout(REQUEST_S)
        head, streams, _, _ = socket.recv_fds(line, 4, 3)
        size = int.from_bytes(head, "big")
        _require(len(head) == 4 and len(streams) == 3 and size <= MAX_REQUEST, "no request")
        data = bytearray()
        while len(data) < size:
            part = line.recv(min(1 << 20, size - len(data)))
            _require(bool(part), "torn")
            data += part
        line.settimeout(None)
        request = Request(**json.loads(data), line=line, streams=streams)
        differing = differences(environ, request.environ)
        _require(not differing, f"{', '.join(differing)} differ from the zygote's")
    except BaseException:
        line.close()
        for stream in streams:
            os.close(stream)
        raise
    return request


def _require(true: bool, else_refuse: str) -> None:
    if not true:
        raise RefusedError(else_refuse)


def differences(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Names of the variables that only a new process would heed, and that are not the same in both."""
    return sorted(
        name
        for name in {*ours, *theirs}
        if name.startswith(START_PREFIXES) and ours.get(name) != theirs.get(name)
    )


# ---- in the child --------------------------------------------------------------------------------------


def become_guard(request: Request) -> None:
    """Take the worker's environment on, answer the stub, and guard. Returns in the worker."""
    os.environ.clear()
    os.environ.update(request.environ)
    rank = os.environ.get(guard.ENV_LOCAL_RANK, "?")
    script.entitle(f"elastic_resume guard of local rank {rank}")
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.umask(request.umask)
    os.sched_setaffinity(0, request.cpus)
    with contextlib.suppress(OSError):  # it is gone: the worker's own first look would fail as well
        os.chdir(request.cwd)
    request.line.sendall(b"y")
    guard.stand(request.line, set(request.mask))


def become_worker(request: Request) -> None:
    """Make of this fork what a new process would be."""
    script.entitle(" ".join(request.command))
    script.enter(request.command, replace_first=True)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()  # of `random` the interpreter takes care
    torch = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() != OLD_TORCH_SEED:
        torch.default_generator.seed()
    sys.stdin = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    failure = sys.modules.get("elastic_resume.worker.failure")
    if failure is not None:
        failure.from_start()  # a script whose imports fail never comes to er.resume, which does it else


if __name__ == "__main__":
    main()
