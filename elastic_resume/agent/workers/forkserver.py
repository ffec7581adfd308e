"""The zygote: imports torch once, and forks a worker whenever a stub asks for one.

Run by the agent as ``python -u zygote.py LISTENER CONTROL AGENT SPEC``, in a session of its own; it
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

import ctypes
import gc
import importlib
import json
import os
import resource
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

from elastic_resume.agent.validation import READ_AT_START
from elastic_resume.agent.workers import run_main, supervisor

# What every script of ours imports before its first step.
# DistributedDataParallel's constructor imports torch._dynamo, 1.1 to 1.8 s.
MODULES = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.utils.data")
OURS = ("elastic_resume.training.api",)
MAX_REQUEST = 16 << 20
REQUEST_S = 1.0  # a stub sends all at once; whoever does not holds up the others
TRY_S = 10.0
OLD_TORCH_SEED = 67280421310721  # what each process starts with where torch does not draw its first seed


@dataclass(frozen=True)
class Request:
    """What a stub asks for, and the guard's line to it."""

    command: list[str]
    environ: dict[str, str]
    cwd: str
    mask: list[int]
    ignored: list[int]
    umask: int
    cpus: list[int]
    limits: dict[str, list[int]]
    nice: int
    line: socket.socket
    streams: list[int]


class RefusedError(Exception):
    """A request cannot be served, for the reason that the text gives."""


def main() -> None:
    """Import, serve, and in a worker run its script. Returns in a worker only, at its script's end."""
    listener, control = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    agent, spec = int(sys.argv[3]), json.loads(sys.argv[4])
    libc = ctypes.CDLL(None)
    libc.prctl(supervisor.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != agent:
        return
    libc.prctl(supervisor.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a killed guard leaves comes to us
    run_main.entitle("er-zygote")
    for own in (listener, control):
        own.set_inheritable(False)  # a process that a module starts would hold them open beyond our end
    for number in supervisor.IGNORED:
        signal.signal(number, signal.SIG_IGN)  # who asks the whole job to end asks the agent
    run_main.enter(spec["command"])
    environ = environment()
    gc.disable()  # what is imported stays, and is frozen below
    _import(spec["preload"], control)
    gc.collect()
    gc.freeze()  # the collector of a worker leaves these pages shared
    imported = {name: value for name, value in environment().items() if environ.get(name) != value}
    request = serve(listener, control, environ, imported)
    gc.enable()
    run_main.run(become_worker(request))


def _import(preload: list[str], control: socket.socket) -> None:
    """Import what workers need; tell the agent what was left out, or which module spoils forks and exit."""
    began = time.monotonic()
    left_out = {}
    for name in [*MODULES, *OURS, *preload]:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit too
            left_out[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        spoiled = why_no_fork() or (_why_a_fork_fails() if name in preload else "")
        if spoiled:
            _tell(control, {"spoiled": name, "why": spoiled})
            supervisor.sweep(supervisor.Page(None), at_once=True)
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
    if supervisor.children():
        return "it starts processes, which workers would not have"
    return ""


def _why_a_fork_fails() -> str:
    """Try it: a pool of native threads that an import has used, OpenMP's say, is missing in a fork.

    Their number tells nothing: OpenBLAS starts some when it is loaded, and stops them before a fork.
    """
    pid = _fork()
    if pid == 0:
        torch = sys.modules["torch"]
        torch.ones(1 << 20).add_(1).sum()
        os._exit(0)
    limit = time.monotonic() + TRY_S
    while time.monotonic() < limit:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return ""
        time.sleep(0.005)
    supervisor.kill(pid)
    os.waitpid(pid, 0)
    return "it uses native threads, and a fork of it hangs in torch"


def environment() -> dict[str, str]:
    """This process's variables, with a character for each byte: they need not be text in any encoding."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in os.environb.items()}


def _tell(control: socket.socket, what: dict[str, Any]) -> None:
    control.sendall(json.dumps(what).encode() + b"\n")


# ---- serving -------------------------------------------------------------------------------------------


def serve(
    listener: socket.socket, control: socket.socket, environ: dict[str, str], imported: dict[str, str]
) -> Request:
    """Fork a guard with a worker for each request. Returns in the workers only.

    Args:
        listener: where stubs ask.
        control: the agent's.
        environ: what this process started with.
        imported: what imports have changed of that.

    """
    bell, ringer = os.pipe()
    for descriptor in (bell, ringer):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, supervisor.wake)
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
            # In either of these the stub sees the line end, and starts its worker cold.
            try:
                request = receive(listener.accept()[0], environ)
            except RefusedError as error:
                _tell(control, {"refused": str(error)})
                continue
            except (OSError, ValueError, TypeError):
                continue
            try:
                pid = _fork()
            except OSError as error:
                _tell(control, {"refused": f"no process can be forked: {error.strerror}"})
                pid = -1
            if pid == 0:
                for ours in (bell, ringer, listener.detach(), control.detach()):
                    os.close(ours)
                kept = {k: v for k, v in imported.items() if request.environ.get(k) == environ.get(k)}
                become_guard(request, kept)
                return request
            guards.add(pid)
            request.line.close()
            for stream in request.streams:
                os.close(stream)


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
    for orphan in set(supervisor.children()) - guards:
        supervisor.kill(orphan)


def receive(line: socket.socket, environ: dict[str, str]) -> Request:
    """Read one request.

    Raises:
        RefusedError: another user's, or its environment needs a process of its own.
        OSError, ValueError: it is torn, too long, or no request.

    """
    streams: list[int] = []
    try:
        _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        _require(uid == os.getuid(), "another user asks")
        limit = time.monotonic() + REQUEST_S
        line.settimeout(REQUEST_S)
        head, streams, _, _ = socket.recv_fds(line, 4, 3)
        size = int.from_bytes(head, "big")
        if len(head) < 4 or len(streams) != 3 or size > MAX_REQUEST:
            raise ValueError("no request")  # noqa: TRY301
        data = bytearray()
        while len(data) < size:
            part = line.recv(min(1 << 20, size - len(data)))
            if not part or time.monotonic() > limit:
                raise ValueError("torn")  # noqa: TRY301
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
        if name.startswith(READ_AT_START) and ours.get(name) != theirs.get(name)
    )


# ---- in the child --------------------------------------------------------------------------------------


def become_guard(request: Request, imported: dict[str, str]) -> None:
    """Take the worker's environment on, answer the stub, and guard. Returns in the worker."""
    signal.set_wakeup_fd(-1)
    for dropped in (*supervisor.IGNORED, signal.SIGCHLD):
        signal.signal(dropped, signal.SIG_IGN if dropped in request.ignored else signal.SIG_DFL)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.environ.clear()
        for name, value in {**request.environ, **imported}.items():
            if name and "=" not in name:  # the kernel hands those on, and no shell or library can set them
                os.environb[name.encode("latin-1")] = value.encode("latin-1")
        run_main.entitle("er-guard")
        for number, stream in enumerate(request.streams):
            os.dup2(stream, number)
            os.close(stream)
        os.umask(request.umask)
        os.sched_setaffinity(0, request.cpus)
        for kind, limits in request.limits.items():
            resource.setrlimit(int(kind), (limits[0], limits[1]))
        os.nice(request.nice - os.nice(0))
        os.chdir(request.cwd.encode("latin-1"))
        request.line.sendall(b"y")
    except (OSError, ValueError):
        os._exit(1)  # the stub sees the line end: it starts its worker cold, or is gone
    supervisor.stand(request.line, set(request.mask))


def become_worker(request: Request) -> list[str]:
    """Make of this fork what a new process would be; give its command."""
    command = [os.fsdecode(word.encode("latin-1")) for word in request.command]
    run_main.entitle("er-worker")
    run_main.enter(command)
    main_thread: Any = threading.main_thread()
    if hasattr(main_thread, "_set_native_id"):
        main_thread._set_native_id()  # noqa: SLF001 - the interpreter does it for threads that it starts
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()  # of `random` the interpreter takes care
    torch = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() != OLD_TORCH_SEED:
        torch.default_generator.seed()
    failure = sys.modules.get("elastic_resume.training.crash_reporting")
    if failure is not None:
        failure.from_start()  # a script whose imports fail never comes to er.resume, which does it else
    return command


if __name__ == "__main__":
    main()
