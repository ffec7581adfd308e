"""The fork server: holds imported torch and forks a worker whenever a launcher shim requests one.

A worker that starts as a new process spends seconds on imports; a forked one starts in milliseconds. The
first fork server is forked from the agent, which has imported torch (`run_preforked`). Later ones are new
processes, ``python -u forkserver.py LISTENER CONTROL AGENT SPEC``. Each dies with the agent. A launcher shim
connects and sends its command, environment and standard streams::

    agent --fork-->  fork server (listens)  --fork-->  supervisor (of one worker)  --fork-->  worker (script)

The first workers of a job of one node do not wait for torch._dynamo and the ``--preload`` modules. The fork
server imports these a little later, while no request waits (`BackgroundWork`). Nodes of a larger job wait
for each other at the start, and so it imports at once. Later it moves its memory into huge pages: a fork then
copies a table of a hundred pages instead of sixty thousand, and takes a quarter of the time.

Invariants:

- A worker finds everything as ``python -u script.py`` would provide it: `__main__`, arguments, search path,
  environment, streams, signals, seeds, exit code, atexit, threads. Only the imported modules are there
  already.
- Some variables take effect only when a process or library starts. If they differ from those of the fork
  server, it refuses, and the launcher shim starts its worker cold.
- CUDA is not initialized here and no thread runs, since neither survives a fork. The agent learns which
  module of ``--preload`` breaks that, and starts a fork server without it. A module that fails is skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import io
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # scripts must not import the modules of this directory

from elastic_resume.agent.workers import children, run_main, script_imports, supervisor, worker_request
from elastic_resume.constants import EXIT_NEEDS_GENERATION
from elastic_resume.mechanisms.registry import WORKER_MODULES

# Imports of every training script. DistributedDataParallel's constructor imports torch._dynamo, in 1.1 to
# 1.8 s.
TORCH_MODULES = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.utils.data")
OWN_MODULES = ("elastic_resume.training.resume", *WORKER_MODULES)
EXIT_MODULE = "elastic_resume.training.worker_exit"  # reports errors of a script before it calls er.resume
# The interpreter, the dynamic loader, a library or torch reads these once, when the process starts.
PROCESS_START_ENV_PREFIXES = (
    "PYTHON", "LD_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LANG", "LC_",
    "TORCH_LOGS", "TORCH_SHOW", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "PYTORCH_",
    "ELASTIC_RESUME_FAILPOINTS",
)  # fmt: skip
FORK_TEST_TIMEOUT_S = 10.0
# Starting workers need the processors for about as long. The first ones run imports of their own.
FIRST_START_S, START_S = 2.0, 0.5
MADV_COLLAPSE = 25  # from linux/mman.h, of Linux 6.1
HUGE_PAGE_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
# torchelastic's variables that a worker lacks which starts early.
VARIABLES_OF_A_GENERATION = frozenset(
    b"RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE"
    b" MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT".split()
)
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


def main() -> None:
    """Run as a new process. Return in a worker only, when its script ends.

    SPEC is a JSON object: the ``command`` of the workers, modules to ``preload``, and ``import_first``.
    """
    listener, control = (socket.socket(fileno=int(argument)) for argument in sys.argv[1:3])
    if _set_up_process(int(sys.argv[3])):
        _serve(listener, control, json.loads(sys.argv[4]))


def run_preforked(listener: socket.socket, control: socket.socket, agent: int) -> NoReturn:
    """Run as a fork of the agent: wait for its request, then serve.

    ``control`` brings a line of JSON: the members of `main`'s SPEC, and ``environ``. This process exits
    if the agent closes the socket first. A worker raises SystemExit when its script ends.
    """
    if not _set_up_process(agent):
        os._exit(1)
    os.setsid()
    _close_inherited_descriptors(keep={listener.fileno(), control.fileno()})
    _unbuffer_streams()
    with control.makefile("rb") as lines:
        line = lines.readline()
    if not line:
        os._exit(0)  # the agent ended before it needed workers
    spec = json.loads(line)
    worker_request.replace_environment(spec["environ"])
    run_main.adopt_path_entry()
    _serve(listener, control, spec)
    raise SystemExit


def _set_up_process(agent: int) -> bool:
    """Set this process's name and signals, and tie it to the agent; return whether the agent lives."""
    libc = ctypes.CDLL(None)
    libc.prctl(supervisor.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(supervisor.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt the leftovers of a killed supervisor
    run_main.set_process_name("er-fork-server")
    for number in supervisor.IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # only the agent handles signals to the whole job
    return os.getppid() == agent


def _close_inherited_descriptors(keep: set[int]) -> None:
    """Close what the agent inherited, as Popen would; stdin becomes empty.

    Files that this process has opened itself belong to its modules.
    """
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the directory's own descriptor is closed already
            if number > 2 and number not in keep and os.get_inheritable(number):
                os.close(number)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)


def _unbuffer_streams() -> None:
    """Replace stdout and stderr by unbuffered streams, as ``python -u`` has them."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        former = getattr(sys, name)
        if former is None:  # the descriptor was closed when the agent started
            continue
        raw: Any = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - as long as the process
        raw.name = f"<{name}>"
        stream: Any = io.TextIOWrapper(
            raw, encoding=former.encoding, errors=former.errors, newline="\n", write_through=True
        )
        stream.mode = "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _serve(listener: socket.socket, control: socket.socket, spec: dict[str, Any]) -> None:
    """Serve launcher shims, and run the script in each worker. Return in a worker only."""
    for own in (listener, control):
        own.set_inheritable(False)  # a process that a module starts would keep them open
    run_main.set_argv_and_path(spec["command"])
    importlib.import_module(EXIT_MODULE)
    gc.disable()  # imported objects are never freed, and are frozen
    gc.freeze()  # a worker's garbage collector then does not copy these pages
    request = serve_requests(listener, control, BackgroundWork(spec, control))
    gc.enable()
    try:
        command = become_worker(request)
        worker_exit: Any = sys.modules[EXIT_MODULE]
        worker_exit.before_resume = script_imports.hide(("torch", *spec["preload"]), command, request.mask)
        run_main.run(command)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if "triton" in sys.modules:
        # Triton 3.9 prints 30 lines about leaks unless its types are freed at the end. That takes a second.
        # A failed worker does not spend it, because the other workers wait for its end.
        gc.unfreeze()


# ---- work in the background ----------------------------------------------------------------------------


class BackgroundWork:
    """Import shared modules, then move memory into huge pages, one piece at a time between requests."""

    def __init__(self, spec: Mapping[str, Any], control: socket.socket) -> None:
        """Plan the imports of the SPEC; ``control`` leads to the agent."""
        self.environ = read_environment()
        """The environment with which this process started."""
        self.changed_variables: dict[str, str] = {}
        """Variables that imports have changed."""
        self._preload: list[str] = spec["preload"]
        self._control = control
        self._started_at = time.monotonic()
        self._skipped: dict[str, str] = {}
        self._next_at = self._started_at if spec["import_first"] else math.inf
        self._pending = [name for name in (*TORCH_MODULES, *OWN_MODULES) if name not in sys.modules]
        self._pending += self._preload
        self._chunks: list[tuple[int, int]] | None = None  # of memory that is still to move
        if not self._pending:
            self._finish_imports()

    def timeout_ms(self) -> float | None:
        """Return how long to wait for a request before the next piece; None: without limit."""
        return None if self._next_at == math.inf else max(0.0, self._next_at - time.monotonic()) * 1000

    def handle_request(self) -> None:
        """Postpone this work, so that starting workers get the processors.

        Only the first request postpones imports. Later ones would put them off again and again.
        """
        if not self._pending:
            self._next_at = time.monotonic() + START_S
        elif self._next_at == math.inf:
            self._next_at = time.monotonic() + FIRST_START_S

    def run_next(self, supervisors: set[int]) -> None:
        """Do the next piece of work; exit if an import makes forks unsafe.

        ``supervisors`` are this process's children; those that end meanwhile are removed.
        """
        if self._pending:
            self._import_next(supervisors)
            return
        if self._chunks is None:
            self._chunks = list_huge_page_chunks()
        if not self._chunks or move_into_huge_pages(*self._chunks.pop()) in {errno.ENOMEM, errno.EBUSY}:
            self._chunks, self._next_at = None, math.inf  # until more workers have started

    def _import_next(self, supervisors: set[int]) -> None:
        _reap_supervisors(supervisors)
        before = set(supervisors)
        name = self._pending.pop(0)
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit too
            self._skipped[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        now = read_environment()
        self.changed_variables = {k: v for k, v in now.items() if self.environ.get(k) != v}
        _reap(supervisors)
        # What a supervisor that was killed meanwhile has left is a child of this process too.
        started = set(children.list_all()) - supervisors if supervisors == before else set()
        obstacle = find_fork_obstacle(started) or (_test_fork() if name in self._preload else "")
        if obstacle:
            _send_status(self._control, {"fork_unsafe_module": name, "reason": obstacle})
            for child in started:
                children.kill(child)
            os._exit(1)  # sys.exit would wait for the module's threads
        if not self._pending:
            self._finish_imports()

    def _finish_imports(self) -> None:
        gc.collect()
        gc.freeze()
        seconds = round(time.monotonic() - self._started_at, 3)
        _send_status(self._control, {"ready": seconds, "skipped_modules": self._skipped})
        self._next_at = time.monotonic() + START_S


def list_huge_page_chunks() -> list[tuple[int, int]]:
    """Return addresses and sizes of this process's own memory, in pieces that fit into a huge page each."""
    try:
        size = int(HUGE_PAGE_SIZE_FILE.read_text())
        lines = Path("/proc/self/maps").read_text().splitlines()
    except (OSError, ValueError):  # the kernel has no transparent huge pages
        return []
    chunks = []
    for line in lines:
        extent, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and inode == "0" and (not name or name[0].startswith(("[heap]", "[anon"))):
            start, stop = (int(address, 16) for address in extent.split("-"))
            first = -(-start // size) * size
            chunks += [(address, size) for address in range(first, stop - size + 1, size)]
    return chunks


def move_into_huge_pages(address: int, size: int) -> int:
    """Have the kernel move one piece; return 0 or the error number.

    ENOMEM and EBUSY mean that memory is short. A kernel before 6.1 returns EINVAL.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_COLLAPSE)
    return ctypes.get_errno() if failed else 0


def find_fork_obstacle(started: set[int]) -> str:
    """Return why a fork of this process would lack something; empty if it would not.

    ``started`` are processes that an import has started.
    """
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "it initializes CUDA, which does not survive a fork"
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"it starts threads ({', '.join(threads)[:200]}), which do not survive a fork"
    if started:
        return "it starts processes, which workers would not have"
    return ""


def _test_fork() -> str:
    """Compute in a fork; return why that fails, or an empty string.

    A pool of native threads that an import has used (OpenMP's) is missing in a fork. Counting native threads
    would not do: OpenBLAS starts some when it is loaded, and stops them before a fork.
    """
    pid = fork()
    if pid == 0:
        torch = sys.modules["torch"]
        torch.ones(1 << 20).add_(1).sum()
        os._exit(0)
    limit = time.monotonic() + FORK_TEST_TIMEOUT_S
    while time.monotonic() < limit:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return ""
        time.sleep(0.005)
    children.kill(pid)
    os.waitpid(pid, 0)
    return "it uses native threads, and a fork of it hangs in torch"


def read_environment() -> dict[str, str]:
    """Return the environment as latin-1, a character for each byte: it need not be valid text."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in os.environb.items()}


def _send_status(control: socket.socket, status: dict[str, Any]) -> None:
    control.sendall(json.dumps(status).encode() + b"\n")


# ---- serving -------------------------------------------------------------------------------------------


def serve_requests(listener: socket.socket, control: socket.socket, work: BackgroundWork) -> WorkerRequest:
    """Fork a supervisor with a worker for each request. Return in a worker only.

    Launcher shims connect to ``listener``; ``control`` leads to the agent.
    """
    wakeup_read, wakeup_write = os.pipe()
    for descriptor in (wakeup_read, wakeup_write):
        os.set_blocking(descriptor, False)
    _watch_children(wakeup_write)
    poll = select.poll()
    poll.register(wakeup_read, select.POLLIN)
    poll.register(listener, select.POLLIN)
    supervisor_pids: set[int] = set()
    while True:
        ready = poll.poll(work.timeout_ms())
        if not ready:
            work.run_next(supervisor_pids)
            _watch_children(wakeup_write)  # a module may have changed that
        for descriptor, _ in ready:
            if descriptor == wakeup_read:
                os.read(wakeup_read, 4096)
                _reap_supervisors(supervisor_pids)
                continue
            work.handle_request()
            # After any failure the launcher shim sees its connection close, and starts its worker cold.
            try:
                request = receive_request(listener.accept()[0], work.environ)
            except worker_request.RequestRefusedError as error:
                _send_status(control, {"refused": str(error)})
                continue
            except (OSError, ValueError, TypeError):
                continue
            try:
                pid = fork()
                supervisor_pids.add(pid)
            except OSError as error:
                _send_status(control, {"refused": f"the fork server cannot fork: {error.strerror}"})
                pid = -1
            if pid == 0:
                for inherited in (wakeup_read, wakeup_write, listener.detach(), control.detach()):
                    os.close(inherited)
                kept = {
                    k: v
                    for k, v in work.changed_variables.items()
                    if request.environ.get(k) == work.environ.get(k)
                }
                become_supervisor(request, kept)
                return request
            request.connection.close()
            for stream in request.streams:
                os.close(stream)


def _watch_children(wakeup_write: int) -> None:
    """Write a byte to the pipe when a child ends."""
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, supervisor.ignore_signal)


def fork() -> int:
    """Fork, as os.fork."""
    with warnings.catch_warnings():
        # Python 3.12 warns of native threads. Those of OpenBLAS handle a fork themselves.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _reap(supervisor_pids: set[int]) -> None:
    """Reap children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            supervisor_pids.discard(pid)


def _reap_supervisors(supervisor_pids: set[int]) -> None:
    """Reap supervisors that have ended, and kill the orphans of those that were killed."""
    _reap(supervisor_pids)
    for orphan in set(children.list_all()) - supervisor_pids:
        children.kill(orphan)


def receive_request(connection: socket.socket, environ: dict[str, str]) -> WorkerRequest:
    """Receive one request.

    Raises:
        RequestRefusedError: another user sent it, or the worker must be a new process.
        OSError, ValueError, TypeError: it is incomplete, too long or malformed.

    """
    streams: list[int] = []
    try:
        members, streams = worker_request.receive(connection)
        request = WorkerRequest(**members, connection=connection, streams=streams)
        differing = list_differing_variables(environ, request.environ)
        if differing:
            raise worker_request.RequestRefusedError(  # noqa: TRY301
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
        worker_request.replace_environment({**request.environ, **changed_by_imports})
        run_main.set_process_name("er-supervisor")
        worker_request.replace_streams(request.streams)
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
    sys.modules[EXIT_MODULE].install_startup_hook()
    if supervisor.ENV_EARLY_START in os.environ:
        variables: Any = os.environ
        os.environb._data = variables._data = _EarlyVariables(variables._data)  # type: ignore[attr-defined]  # noqa: SLF001
    return command


class _EarlyVariables(dict[bytes, bytes]):
    """The environment of a worker that starts early. It exits if it reads what a generation decides."""

    def __missing__(self, name: bytes) -> bytes:
        # While the worker resumes, it replaces the environment by that of its generation.
        if name in VARIABLES_OF_A_GENERATION and supervisor.ENV_EARLY_START.encode() in self:
            frame = sys._getframe(1)  # noqa: SLF001
            while frame.f_back is not None and frame.f_globals.get("__name__") in {"os", "collections.abc"}:
                frame = frame.f_back
            place, variable = f"{frame.f_code.co_filename}:{frame.f_lineno}", name.decode()
            message = (
                f"elastic_resume: {place} reads {variable} before er.resume(), so this worker cannot start "
                f"before its node joins; the other nodes wait for it. Read {variable} after er.resume().\n"
            )
            os.write(2, message.encode())
            os._exit(EXIT_NEEDS_GENERATION)
        raise KeyError(name)


if __name__ == "__main__":
    main()
