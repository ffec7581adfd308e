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

from elastic_resume.agent.validation import PROCESS_START_ENV_PREFIXES
from elastic_resume.agent.workers import run_main, supervisor

# What every script of ours imports before its first step.
# DistributedDataParallel's constructor imports torch._dynamo, 1.1 to 1.8 s.
TORCH_MODULES = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.utils.data")
OWN_MODULES = ("elastic_resume.training.api",)
MAX_REQUEST_BYTES = 16 << 20
REQUEST_TIMEOUT_S = 1.0  # a stub sends all at once; whoever does not holds up the others
FORK_TEST_TIMEOUT_S = 10.0
OLD_TORCH_SEED = 67280421310721  # what each process starts with where torch does not draw its first seed


@dataclass(frozen=True)
class WorkerRequest:
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
    connection: socket.socket
    streams: list[int]


class RequestRefusedError(Exception):
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
    run_main.set_process_name("er-zygote")
    for own in (listener, control):
        own.set_inheritable(False)  # a process that a module starts would hold them open beyond our end
    for number in supervisor.IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # who asks the whole job to end asks the agent
    run_main.set_argv_and_path(spec["command"])
    environ = read_environment()
    gc.disable()  # what is imported stays, and is frozen below
    _import_modules(spec["preload"], control)
    gc.collect()
    gc.freeze()  # the collector of a worker leaves these pages shared
    imported = {name: value for name, value in read_environment().items() if environ.get(name) != value}
    request = serve_requests(listener, control, environ, imported)
    gc.enable()
    run_main.run(become_worker(request))


def _import_modules(preload: list[str], control: socket.socket) -> None:
    """Import what workers need; tell the agent what was left out, or which module spoils forks and exit."""
    began = time.monotonic()
    left_out = {}
    for name in [*TORCH_MODULES, *OWN_MODULES, *preload]:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit too
            left_out[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        spoiled = find_fork_obstacle() or (_test_fork() if name in preload else "")
        if spoiled:
            _send_status(control, {"fork_unsafe_module": name, "why": spoiled})
            supervisor.kill_leftovers(supervisor.LeaseView(None), at_once=True)
            os._exit(1)  # an exit in good order would wait for its threads
    _send_status(control, {"ready": round(time.monotonic() - began, 3), "skipped_modules": left_out})


def find_fork_obstacle() -> str:
    """What of this process would not survive a fork; empty when all would."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "it initialises CUDA, which does not survive a fork"
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"it starts threads ({', '.join(threads)[:200]}), which do not survive a fork"
    if supervisor.list_children():
        return "it starts processes, which workers would not have"
    return ""


def _test_fork() -> str:
    """Try it: a pool of native threads that an import has used, OpenMP's say, is missing in a fork.

    Their number tells nothing: OpenBLAS starts some when it is loaded, and stops them before a fork.
    """
    pid = _fork()
    if pid == 0:
        torch = sys.modules["torch"]
        torch.ones(1 << 20).add_(1).sum()
        os._exit(0)
    limit = time.monotonic() + FORK_TEST_TIMEOUT_S
    while time.monotonic() < limit:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return ""
        time.sleep(0.005)
    supervisor.kill(pid)
    os.waitpid(pid, 0)
    return "it uses native threads, and a fork of it hangs in torch"


def read_environment() -> dict[str, str]:
    """This process's variables, with a character for each byte: they need not be text in any encoding."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in os.environb.items()}


def _send_status(control: socket.socket, status: dict[str, Any]) -> None:
    control.sendall(json.dumps(status).encode() + b"\n")


# ---- serving -------------------------------------------------------------------------------------------


def serve_requests(
    listener: socket.socket,
    control: socket.socket,
    environ: dict[str, str],
    changed_by_imports: dict[str, str],
) -> WorkerRequest:
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
    signal.signal(signal.SIGCHLD, supervisor.ignore_signal)
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    poll.register(listener, select.POLLIN)
    guards: set[int] = set()
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == bell:
                os.read(bell, 4096)
                _reap_supervisors(guards)
                continue
            # In either of these the stub sees the line end, and starts its worker cold.
            try:
                request = receive_request(listener.accept()[0], environ)
            except RequestRefusedError as error:
                _send_status(control, {"refused": str(error)})
                continue
            except (OSError, ValueError, TypeError):
                continue
            try:
                pid = _fork()
            except OSError as error:
                _send_status(control, {"refused": f"no process can be forked: {error.strerror}"})
                pid = -1
            if pid == 0:
                for ours in (bell, ringer, listener.detach(), control.detach()):
                    os.close(ours)
                kept = {
                    k: v for k, v in changed_by_imports.items() if request.environ.get(k) == environ.get(k)
                }
                become_supervisor(request, kept)
                return request
            guards.add(pid)
            request.connection.close()
            for stream in request.streams:
                os.close(stream)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of native threads (OpenBLAS's), which have their own way through a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _reap_supervisors(supervisor_pids: set[int]) -> None:
    """Collect guards that have ended, and kill what those that were killed have left to us."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            break
        supervisor_pids.discard(pid)
    for orphan in set(supervisor.list_children()) - supervisor_pids:
        supervisor.kill(orphan)


def receive_request(connection: socket.socket, environ: dict[str, str]) -> WorkerRequest:
    """Read one request.

    Raises:
        RefusedError: another user's, or its environment needs a process of its own.
        OSError, ValueError: it is torn, too long, or no request.

    """
    streams: list[int] = []
    try:
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        _require(uid == os.getuid(), "another user asks")
        limit = time.monotonic() + REQUEST_TIMEOUT_S
        connection.settimeout(REQUEST_TIMEOUT_S)
        head, streams, _, _ = socket.recv_fds(connection, 4, 3)
        size = int.from_bytes(head, "big")
        if len(head) < 4 or len(streams) != 3 or size > MAX_REQUEST_BYTES:
            raise ValueError("no request")  # noqa: TRY301
        data = bytearray()
        while len(data) < size:
            part = connection.recv(min(1 << 20, size - len(data)))
            if not part or time.monotonic() > limit:
                raise ValueError("torn")  # noqa: TRY301
            data += part
        connection.settimeout(None)
        request = WorkerRequest(**json.loads(data), connection=connection, streams=streams)
        differing = list_differing_variables(environ, request.environ)
        _require(not differing, f"{', '.join(differing)} differ from the zygote's")
    except BaseException:
        connection.close()
        for stream in streams:
            os.close(stream)
        raise
    return request


def _require(condition: bool, refusal: str) -> None:
    if not condition:
        raise RequestRefusedError(refusal)


def list_differing_variables(own: dict[str, str], requested: dict[str, str]) -> list[str]:
    """Names of the variables that only a new process would heed, and that are not the same in both."""
    return sorted(
        name
        for name in {*own, *requested}
        if name.startswith(PROCESS_START_ENV_PREFIXES) and own.get(name) != requested.get(name)
    )


# ---- in the child --------------------------------------------------------------------------------------


def become_supervisor(request: WorkerRequest, changed_by_imports: dict[str, str]) -> None:
    """Take the worker's environment on, answer the stub, and guard. Returns in the worker."""
    signal.set_wakeup_fd(-1)
    for dropped in (*supervisor.IGNORED_SIGNALS, signal.SIGCHLD):
        signal.signal(dropped, signal.SIG_IGN if dropped in request.ignored else signal.SIG_DFL)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.environ.clear()
        for name, value in {**request.environ, **changed_by_imports}.items():
            if name and "=" not in name:  # the kernel hands those on, and no shell or library can set them
                os.environb[name.encode("latin-1")] = value.encode("latin-1")
        run_main.set_process_name("er-guard")
        for number, stream in enumerate(request.streams):
            os.dup2(stream, number)
            os.close(stream)
        os.umask(request.umask)
        os.sched_setaffinity(0, request.cpus)
        for kind, limits in request.limits.items():
            resource.setrlimit(int(kind), (limits[0], limits[1]))
        os.nice(request.nice - os.nice(0))
        os.chdir(request.cwd.encode("latin-1"))
        request.connection.sendall(b"y")
    except (OSError, ValueError):
        os._exit(1)  # the stub sees the line end: it starts its worker cold, or is gone
    supervisor.fork_supervised_worker(request.connection, set(request.mask))


def become_worker(request: WorkerRequest) -> list[str]:
    """Make of this fork what a new process would be; give its command."""
    command = [os.fsdecode(word.encode("latin-1")) for word in request.command]
    run_main.set_process_name("er-worker")
    run_main.set_argv_and_path(command)
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
        failure.install_startup_hook()  # a script whose imports fail never comes to er.resume, which does it else
    return command


if __name__ == "__main__":
    main()
