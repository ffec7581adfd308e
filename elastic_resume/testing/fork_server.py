"""Start agents of simulated nodes as forks of one process that has imported torch.

A forked agent behaves like a new process with the same command, environment and output. `start` returns None
where a fork is not possible. Fork servers live as long as this process and end with it, as do all their
forks. The program of the fork server itself is `fork_server_main`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from elastic_resume import constants
from elastic_resume.agent.workers import forkserver
from elastic_resume.agent.workers.forkserver_manager import ForkedProcess, has_ended
from elastic_resume.errors import MachineError
from elastic_resume.testing import fork_server_main

KILL_TIMEOUT_S = 30.0  # a process may sleep in the kernel for longer
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
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


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Call it between fork and exec."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def kill(process: psutil.Process) -> None:
    """Send SIGKILL; ignore a process that is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def wait_for_exit(process: psutil.Process) -> None:
    """Wait until all threads of a killed process have ended; init may reap it seconds later."""
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        if not process.is_running():
            return
        descriptor = os.pidfd_open(process.pid)
        try:
            waiting = select.poll()  # select() refuses descriptors above 1023
            waiting.register(descriptor, select.POLLIN)
            waiting.poll(KILL_TIMEOUT_S * 1000)
        finally:
            os.close(descriptor)


SERVER_PROGRAM = Path(fork_server_main.__file__)
MAX_SERVERS = 3  # 300 MB each; one for each set of variables that only a new interpreter reads
REPLY_TIMEOUT_S = 120.0  # the first agent waits for the imports


class AgentForkServer:
    """One process that forks agents. Use `start` to get one."""

    def __init__(self, env: Mapping[str, str], program: Path | None = None) -> None:
        """Start it; ``program`` replaces `fork_server_main`."""
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
        """Fork an agent; further arguments are for other programs than `fork_server_main`.

        Raises:
            OSError, EOFError: the fork server is gone.

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
        except (OSError, EOFError):
            return -9  # the fork server has ended, and the kernel has killed its forks
        return code

    def _request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request and receive its answer.

        An interrupt in between, by Ctrl-C or a time limit of pytest, ends the fork server. Otherwise the next
        request would get that answer, and the forked process would belong to nobody.
        """
        with self._lock:
            try:
                fork_server_main.send(self._connection, message, descriptors)
                return fork_server_main.receive(self._connection)[0]
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


_servers: dict[frozenset[tuple[str, str]], AgentForkServer] = {}
_servers_lock = threading.Lock()


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
    with _servers_lock:
        server = _servers.get(frozenset(interpreter_env.items()))
        if server is None or not server.alive:
            if server is None and len(_servers) >= MAX_SERVERS:
                return None
            kept = {k: v for k, v in env.items() if not k.startswith("ELASTIC_RESUME_") and k != "TMPDIR"}
            kept.update(
                {k: v for k, v in os.environ.items() if k == "TMPDIR"}
            )  # the fork server outlives the temporary directory of these nodes
            server = _servers[frozenset(interpreter_env.items())] = AgentForkServer(kept)
            atexit.register(server.close)
    with contextlib.suppress(OSError, EOFError):
        return server.fork(command, env, output.fileno(), cwd=cwd or Path.cwd(), network=network)
    return None
