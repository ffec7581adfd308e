"""Start agents of simulated nodes as forks of one process that has imported torch.

A forked agent behaves like a new process with the same command, environment and output. `start` returns None
where a fork is not possible. Fork servers end with this process, as do all their forks; an idle one ends
sooner if another environment needs one.

This file is also the program of the fork server: ``python -u fork_server.py DESCRIPTOR PARENT``. It imports
once, and forks agents on request. A simulated node needs seconds for the imports of its agent; on one machine
all nodes share them. A forked agent runs `elastic_resume.cli` with its own command, environment, directory,
network and output. Variables that only a new interpreter reads (`forkserver.PROCESS_START_ENV_PREFIXES`) must
be equal in all; the caller checks that.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, TypeVar

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # scripts must not import the modules of this directory

import psutil

from elastic_resume import constants, failpoints, linux
from elastic_resume.agent.workers import forkserver, forkserver_manager, run_main, worker_request
from elastic_resume.agent.workers.forkserver_manager import ForkedProcess, has_ended
from elastic_resume.errors import MachineError
from elastic_resume.local_socket import receive_message, send_message

CLONE_NEWNET = 0x40000000
MAX_MESSAGE_BYTES = 16 << 20
KILL_TIMEOUT_S = 30.0  # a process may sleep in the kernel for longer
_LIBC = ctypes.CDLL(None, use_errno=True)
_start_requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] | None = None
_starter_lock = threading.Lock()
T = TypeVar("T")
AgentProcess = subprocess.Popen[bytes] | ForkedProcess
"""A process of a simulated node."""


def start_with_lasting_parent(start: Callable[[], T]) -> T:
    """Start a process from a thread that lasts as long as this process.

    PR_SET_PDEATHSIG fires when the thread that forked ends. Threads of an executor end before the exit
    handlers run.

    Raises:
        MachineError: this process may not start another thread.

    """
    global _start_requests  # noqa: PLW0603  one for the process
    with _starter_lock:
        if _start_requests is None:
            requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve_start_requests,
                args=(requests,),
                name="elastic-resume-process-starter",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:
                raise MachineError(f"no process can be started: {error}.") from error
            _start_requests = requests
    result: Future[T] = Future()
    _start_requests.put((start, result))
    return result.result()


def _serve_start_requests(requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    while True:
        start, result = requests.get()
        try:
            result.set_result(start())
        except BaseException as error:  # noqa: BLE001  the caller raises it
            result.set_exception(error)
        del start, result  # do not keep a process alive until the next request


def _reset_after_fork() -> None:
    """Forget the threads of the parent process."""
    global _start_requests, _starter_lock
    _start_requests, _starter_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


def kill(process: psutil.Process) -> None:
    """Send SIGKILL; ignore a process that is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def wait_for_exit(process: psutil.Process) -> None:
    """Wait until all threads of a killed process have ended; init may reap it seconds later."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.is_running():
            has_ended(process.pid, KILL_TIMEOUT_S)


SERVER_PROGRAM = Path(__file__)
MAX_SERVERS = 3  # 300 MB each; one for each set of variables that only a new interpreter reads
REPLY_TIMEOUT_S = 120.0  # the first agent waits for the imports


class AgentForkServer:
    """One process that forks agents. Use `start` to get one."""

    def __init__(self, env: Mapping[str, str], program: Path | None = None) -> None:
        """Start it; ``program`` replaces this file."""
        self._connection, child = socket.socketpair()
        self._lock = threading.Lock()
        with child:
            self._process = start_with_lasting_parent(
                lambda: subprocess.Popen(
                    [sys.executable, "-u", program or SERVER_PROGRAM, str(child.fileno()), str(os.getpid())],
                    pass_fds=(child.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=env,
                    start_new_session=True,
                )
            )
        self._connection.settimeout(REPLY_TIMEOUT_S)

    def fork(
        self,
        command: list[str],
        env: Mapping[str, str],
        output: int,
        *,
        cwd: Path,
        network: str = "",
        **more: object,
    ) -> ForkedProcess:
        """Fork an agent; further arguments are for other programs than this file.

        Raises:
            OSError: the fork server is gone.

        """
        request = {
            "command": command,
            "env": {
                os.fsencode(k).decode("latin-1"): os.fsencode(v).decode("latin-1") for k, v in env.items()
            },
            "cwd": str(cwd),
            "network": network,
            **more,
        }
        return ForkedProcess(int(self._request(request, [output])["pid"]), self._reap)

    def _reap(self, pid: int) -> int | None:
        if self.alive and has_ended(pid) is False:  # cheaper than a request
            return None
        try:
            code: int | None = self._request({"reap": pid})["code"]
        except OSError:
            return -9  # the fork server has ended, and the kernel has killed its forks
        return code

    def _request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """Send a request and receive its answer.

        An interrupt in between, by Ctrl-C or a time limit of pytest, ends the fork server. Otherwise the next
        request would get that answer, and the forked process would belong to nobody.
        """
        with self._lock:
            try:
                send_message(self._connection, json.dumps(message).encode(), descriptors)
                answer, _ = receive_message(self._connection, MAX_MESSAGE_BYTES)
                return json.loads(answer)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the fork server and all that it has forked."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def is_idle(self) -> bool:
        """Whether none of its forks runs, and none waits for its exit code to be read."""
        try:
            return not psutil.Process(self._process.pid).children()
        except psutil.NoSuchProcess:
            return True


_servers: dict[frozenset[tuple[str, str]], AgentForkServer] = {}  # the one used last stands last
_servers_lock = threading.Lock()


def _close_idle_server() -> bool:
    """Close the idle fork server that was used longest ago; return whether there was one."""
    for key, server in _servers.items():
        if server.is_idle:
            del _servers[key]
            atexit.unregister(server.close)
            server.close()
            return True
    return False


def start(
    command: list[str],
    env: Mapping[str, str],
    output: IO[bytes],
    *,
    cwd: Path | None = None,
    network: str = "",
) -> ForkedProcess | None:
    """Fork ``command``, which is ``python -m ...``; return None if it must be started as a new process.

    Args:
        command: the command line.
        env: its environment.
        output: file for its output.
        cwd: its working directory; None: that of this process.
        network: path of the network namespace to run in; empty: that of this process.

    """
    interpreter_env = {
        name: value
        for name, value in env.items()
        if name.startswith(forkserver.PROCESS_START_ENV_PREFIXES) and name != constants.ENV_FAILPOINTS
    }
    key = frozenset(interpreter_env.items())
    with _servers_lock:
        server = _servers.pop(key, None)
        if server is None or not server.alive:
            if len(_servers) >= MAX_SERVERS and not _close_idle_server():
                return None
            kept = {k: v for k, v in env.items() if not k.startswith("ELASTIC_RESUME_") and k != "TMPDIR"}
            kept.update(
                {k: v for k, v in os.environ.items() if k == "TMPDIR"}
            )  # the fork server outlives the temporary directory of these nodes
            server = AgentForkServer(kept)
            atexit.register(server.close)
        _servers[key] = server
    with contextlib.suppress(OSError):
        return server.fork(command, env, output.fileno(), cwd=cwd or Path.cwd(), network=network)
    return None


# ---- the process ---------------------------------------------------------------------------------------


def main(set_up: Callable[..., Callable[[], None]] | None = None) -> None:
    """Import, then serve until the socket is closed. It returns only in a fork, at the fork's end.

    ``set_up`` is called in each fork, in place of `set_up_agent`.
    """
    connection, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if not _die_with_parent(parent):
        return
    connection.set_inheritable(False)
    run_main.set_process_name("er-agent-forks")
    before = forkserver.read_environment()
    gc.disable()
    for name in (
        "elastic_resume.agent.torchelastic",
        "elastic_resume.agent.main",
        *forkserver.TORCH_MODULES,
        *forkserver.OWN_MODULES,
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    # All forks share this memory. In huge pages each agent would cause copies of them, which takes longer.
    forkserver.HUGE_PAGE_SIZE_FILE = Path(os.devnull)
    imported = {k: v for k, v in forkserver.read_environment().items() if before.get(k) != v}
    become = _serve(connection, imported, set_up or set_up_agent)
    gc.enable()
    become()


def _die_with_parent(parent: int) -> bool:
    """Ask the kernel to kill this process with its parent; return whether the parent still lives."""
    linux.die_with_parent()
    return os.getppid() == parent


def _serve(
    connection: socket.socket, import_environment: dict[str, str], set_up: Callable[..., Callable[[], None]]
) -> Callable[[], None]:
    """Serve requests. It returns only in a fork: the function that the fork runs."""
    server_pid = os.getpid()
    while True:
        try:
            data, descriptors = receive_message(connection, MAX_MESSAGE_BYTES, 1)
        except OSError:
            os._exit(0)  # the kernel ends the forked processes
        request = json.loads(data)
        if "reap" in request:
            answer = {"code": forkserver_manager.reap(request["reap"])}
        else:
            answer = {"pid": forkserver.fork()}
            if answer["pid"] == 0:
                connection.close()
                return set_up(server_pid, request, descriptors[0], import_environment)
            os.close(descriptors[0])
        send_message(connection, json.dumps(answer).encode())


def set_up_agent(
    parent: int, request: dict[str, Any], output: int, import_environment: dict[str, str]
) -> Callable[[], None]:
    """In the fork: apply the request; return the function to run."""
    if not _die_with_parent(parent):
        os._exit(1)
    os.setsid()
    empty = os.open(os.devnull, os.O_RDONLY)
    for stream, number in ((empty, 0), (output, 1), (output, 2)):
        os.dup2(stream, number)
    os.close(empty)
    os.close(output)
    worker_request.replace_environment({**import_environment, **request["env"]})
    tempfile.tempdir = None  # computed anew from the changed environment
    failpoints.arm()
    if request["network"]:
        _enter_network(request["network"])
    os.chdir(request["cwd"])
    command = request["command"]
    run_main.set_process_name("er-agent")
    command[1:1] = ["-u"]  # this process runs with -u too; the environment asks for the same
    run_main.set_argv_and_path(command)
    return lambda: _run_command(command)


def _run_command(command: list[str]) -> None:
    """Run the command and exit."""
    code, agent = 0, os.getpid()
    try:
        run_main.run(command)
    except SystemExit as end:
        if os.getpid() != agent:  # the end of a worker's script: the agent has forked the fork server
            raise
        if end.code is not None and not isinstance(end.code, int):
            raise
        code = end.code or 0
    run_main.exit_without_freeing(code)


def _enter_network(path: str) -> None:
    space = os.open(path, os.O_RDONLY)
    if _LIBC.setns(space, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network {path}")
    os.close(space)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
