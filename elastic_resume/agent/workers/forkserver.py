"""The fork server: imports torch once and forks a worker whenever a launcher shim requests one.

A worker that starts as a new process spends seconds on imports; a forked one starts in milliseconds. The
agent runs this module as ``python -u forkserver.py LISTENER CONTROL AGENT SPEC``, and it dies with the
agent. A launcher shim connects and sends its command, environment and standard streams::

    fork server (imports, listens)  --fork-->  supervisor (of one worker)  --fork-->  worker (runs the script)

Invariants:

- A worker finds everything as ``python -u script.py`` would provide it: `__main__`, arguments, search path,
  environment, streams, signals, seeds, exit code, atexit, threads. Only the imported modules are there
  already.
- Some variables take effect only when a process or library starts. If they differ from those of the fork
  server, it refuses, and the launcher shim starts its worker cold.
- CUDA is not initialized here and no thread runs, since neither survives a fork. The agent learns which
  module of ``--preload`` breaks that, or fails, and starts a fork server without it.
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
    del sys.path[0]  # scripts must not import the modules of this directory

from elastic_resume.agent.workers import run_main, supervisor

# Imports of every training script. DistributedDataParallel's constructor imports torch._dynamo, in 1.1 to
# 1.8 s.
TORCH_MODULES = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.utils.data")
OWN_MODULES = ("elastic_resume.training.run",)
# The interpreter, the dynamic loader, a library or torch reads these once, when the process starts.
PROCESS_START_ENV_PREFIXES = (
    "PYTHON", "LD_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LANG", "LC_",
    "TORCH_LOGS", "TORCH_SHOW", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "PYTORCH_",
    "ELASTIC_RESUME_FAILPOINTS",
)  # fmt: skip
MAX_REQUEST_BYTES = 16 << 20
REQUEST_TIMEOUT_S = 1.0  # a launcher shim sends its request at once; other shims wait for it
FORK_TEST_TIMEOUT_S = 10.0
OLD_TORCH_SEED = 67280421310721  # initial seed of each process in versions of torch that do not draw it


@dataclass(frozen=True)
class WorkerRequest:
    """The attributes of the worker that a launcher shim requests, and the socket to that shim."""

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
    """The fork server refuses a request; the text says why."""


def main() -> None:
    """Import, serve, and run the script in each worker. Return in a worker only, when its script ends."""
    listener, control = (socket.socket(fileno=int(argument)) for argument in sys.argv[1:3])
    agent, spec = int(sys.argv[3]), json.loads(sys.argv[4])
    libc = ctypes.CDLL(None)
    libc.prctl(supervisor.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != agent:
        return
    libc.prctl(supervisor.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt the leftovers of a killed supervisor
    run_main.set_process_name("er-fork-server")
    for own in (listener, control):
        own.set_inheritable(False)  # a process that a module starts would keep them open
    for number in supervisor.IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # only the agent handles signals to the whole job
    run_main.set_argv_and_path(spec["command"])
    environ = read_environment()
    gc.disable()  # imported objects are never freed, and are frozen below
    _import_modules(spec["preload"], control)
    gc.collect()
    gc.freeze()  # a worker's garbage collector then does not copy these pages
    changed = {name: value for name, value in read_environment().items() if environ.get(name) != value}
    request = serve_requests(listener, control, environ, changed)
    gc.enable()
    try:
        run_main.run(become_worker(request))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if "triton" in sys.modules:
        # Triton 3.9 prints 30 lines about leaks unless its types are freed at the end. That takes a second.
        # A failed worker does not spend it, because the other workers wait for its end.
        gc.unfreeze()


def _import_modules(preload: list[str], control: socket.socket) -> None:
    """Import the modules of all workers and report to the agent; exit if a module makes forks unsafe."""
    start = time.monotonic()
    skipped = {}
    for name in [*TORCH_MODULES, *OWN_MODULES, *preload]:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit too
            skipped[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        obstacle = find_fork_obstacle() or (_test_fork() if name in preload else "")
        if obstacle:
            _send_status(control, {"fork_unsafe_module": name, "reason": obstacle})
            supervisor.kill_leftovers(supervisor.LeaseView(None), at_once=True)
            os._exit(1)  # sys.exit would wait for the module's threads
    _send_status(control, {"ready": round(time.monotonic() - start, 3), "skipped_modules": skipped})


def find_fork_obstacle() -> str:
    """Return why a fork of this process would lack something; empty if it would not."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "it initializes CUDA, which does not survive a fork"
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"it starts threads ({', '.join(threads)[:200]}), which do not survive a fork"
    if supervisor.list_children():
        return "it starts processes, which workers would not have"
    return ""


def _test_fork() -> str:
    """Compute in a fork; return why that fails, or an empty string.

    A pool of native threads that an import has used (OpenMP's) is missing in a fork. Counting native threads
    would not do: OpenBLAS starts some when it is loaded, and stops them before a fork.
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
    """Return the environment as latin-1, a character for each byte: it need not be valid text."""
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
    """Fork a supervisor with a worker for each request. Return in a worker only.

    Launcher shims connect to ``listener``; ``control`` leads to the agent. This process started with
    ``environ``, and imports have changed the variables ``changed_by_imports``.
    """
    wakeup_read, wakeup_write = os.pipe()
    for descriptor in (wakeup_read, wakeup_write):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, supervisor.ignore_signal)
    poll = select.poll()
    poll.register(wakeup_read, select.POLLIN)
    poll.register(listener, select.POLLIN)
    supervisor_pids: set[int] = set()
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == wakeup_read:
                os.read(wakeup_read, 4096)
                _reap_supervisors(supervisor_pids)
                continue
            # After any failure the launcher shim sees its connection close, and starts its worker cold.
            try:
                request = receive_request(listener.accept()[0], environ)
            except RequestRefusedError as error:
                _send_status(control, {"refused": str(error)})
                continue
            except (OSError, ValueError, TypeError):
                continue
            try:
                pid = _fork()
                supervisor_pids.add(pid)
            except OSError as error:
                _send_status(control, {"refused": f"the fork server cannot fork: {error.strerror}"})
                pid = -1
            if pid == 0:
                for inherited in (wakeup_read, wakeup_write, listener.detach(), control.detach()):
                    os.close(inherited)
                kept = {
                    k: v for k, v in changed_by_imports.items() if request.environ.get(k) == environ.get(k)
                }
                become_supervisor(request, kept)
                return request
            request.connection.close()
            for stream in request.streams:
                os.close(stream)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of native threads. Those of OpenBLAS handle a fork themselves.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _reap_supervisors(supervisor_pids: set[int]) -> None:
    """Reap supervisors that have ended, and kill the orphans of those that were killed."""
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
    """Receive one request.

    Raises:
        RequestRefusedError: another user sent it, or the worker must be a new process.
        OSError, ValueError, TypeError: it is incomplete, too long or malformed.

    """
    streams: list[int] = []
    try:
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            raise RequestRefusedError("the request is another user's")  # noqa: TRY301
        limit = time.monotonic() + REQUEST_TIMEOUT_S
        connection.settimeout(REQUEST_TIMEOUT_S)
        header, streams, _, _ = socket.recv_fds(connection, 4, 3)
        size = int.from_bytes(header, "big")
        if len(header) < 4 or len(streams) != 3 or size > MAX_REQUEST_BYTES:
            raise ValueError("no request")  # noqa: TRY301
        data = bytearray()
        while len(data) < size:
            part = connection.recv(min(1 << 20, size - len(data)))
            if not part or time.monotonic() > limit:
                raise ValueError("incomplete request")  # noqa: TRY301
            data += part
        connection.settimeout(None)
        request = WorkerRequest(**json.loads(data), connection=connection, streams=streams)
        differing = list_differing_variables(environ, request.environ)
        if differing:
            raise RequestRefusedError(  # noqa: TRY301
                "these variables differ from the fork server's and take effect only in a new process: "
                + ", ".join(differing)
            )
    except BaseException:
        connection.close()
        for stream in streams:
            os.close(stream)
        raise
    return request


def list_differing_variables(own: dict[str, str], requested: dict[str, str]) -> list[str]:
    """Return the names of variables that only a new process reads and that differ between the two."""
    return sorted(
        name
        for name in {*own, *requested}
        if name.startswith(PROCESS_START_ENV_PREFIXES) and own.get(name) != requested.get(name)
    )


# ---- in the child --------------------------------------------------------------------------------------


def become_supervisor(request: WorkerRequest, changed_by_imports: dict[str, str]) -> None:
    """Take on the worker's attributes, answer the launcher shim and supervise. Return in the worker only."""
    signal.set_wakeup_fd(-1)
    for number in (*supervisor.IGNORED_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN if number in request.ignored else signal.SIG_DFL)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.environ.clear()
        for name, value in {**request.environ, **changed_by_imports}.items():
            if name and "=" not in name:  # the kernel passes such names on, but putenv refuses them
                os.environb[name.encode("latin-1")] = value.encode("latin-1")
        run_main.set_process_name("er-supervisor")
        for target, stream in enumerate(request.streams):
            os.dup2(stream, target)
            os.close(stream)
        os.umask(request.umask)
        os.sched_setaffinity(0, request.cpus)
        for kind, limits in request.limits.items():
            resource.setrlimit(int(kind), (limits[0], limits[1]))
        os.nice(request.nice - os.nice(0))
        os.chdir(request.cwd.encode("latin-1"))
        request.connection.sendall(b"y")
    except (OSError, ValueError):
        os._exit(1)  # the launcher shim has ended, or sees its connection close and starts its worker cold
    supervisor.fork_supervised_worker(request.connection, set(request.mask))


def become_worker(request: WorkerRequest) -> list[str]:
    """Give this fork what a new process would have; return its command."""
    command = [os.fsdecode(argument.encode("latin-1")) for argument in request.command]
    run_main.set_process_name("er-worker")
    run_main.set_argv_and_path(command)
    main_thread: Any = threading.main_thread()
    if hasattr(main_thread, "_set_native_id"):
        main_thread._set_native_id()  # noqa: SLF001 - the interpreter does it only for threads that it starts
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()  # the interpreter itself reseeds `random`
    torch = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() != OLD_TORCH_SEED:
        torch.default_generator.seed()
    worker_exit = sys.modules.get("elastic_resume.training.worker_exit")
    if worker_exit is not None:
        worker_exit.install_startup_hook()  # a script may fail before it calls er.resume
    return command


if __name__ == "__main__":
    main()
