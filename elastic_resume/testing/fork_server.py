"""Where simulated nodes get their agents from: forks of one process that has imported torch for all of them.

Promise: what is given back is a process like one that was started with the same command, environment and
output; where no fork can be had, None. Nurseries live as long as this process, and end with it, as do
all that came from them. Does not know how a fork is made into an agent (`brood.py`).

How simulated nodes end: with whoever simulates them, or killed, and then gone for certain.
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
from typing import IO, Any, Protocol, TypeVar

import psutil

from elastic_resume import constants
from elastic_resume.agent import validation
from elastic_resume.errors import MachineError
from elastic_resume.testing import fork_server_main

KILL_TIMEOUT_S = 30.0  # one that sleeps in the kernel for longer is left to it
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_start_requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] | None = None
T = TypeVar("T")


class AgentProcess(Protocol):
    """A process of a simulated node, with the words that `subprocess.Popen` has for its end."""

    @property
    def pid(self) -> int:
        """By which this machine knows it."""

    def poll(self) -> int | None:
        """Give the exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, at most so many seconds."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it is known to have ended."""


def start_with_lasting_parent(start: Callable[[], T]) -> T:
    """Start a process that is to end with this one, and not before.

    The kernel counts the thread that forks as the parent, so that is one which lasts as long as the process:
    threads that are waited for, as those of an executor, end before what runs at exit.

    Raises:
        MachineError: this process may have no more threads.

    """
    global _start_requests  # noqa: PLW0603  one for the process
    with _lock:
        if _start_requests is None:
            births: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve_start_requests,
                args=(births,),
                name="elastic-resume-process-starter",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:
                raise MachineError(f"no process can be started: {error}.") from error
            _start_requests = births
    born: Future[T] = Future()
    _start_requests.put((start, born))
    return born.result()


def _serve_start_requests(requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    while True:
        start, born = requests.get()
        try:
            born.set_result(start())
        except BaseException as error:  # noqa: BLE001  it is raised where it was asked for
            born.set_exception(error)
        del start, born  # what a process stands on is kept by whoever has it, and not here until the next


def _reset_after_fork() -> None:
    """A fork has none of this process's threads."""
    global _start_requests, _lock
    _start_requests, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: see `start_to_last`. Between fork and exec."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def kill(process: psutil.Process) -> None:
    """Send SIGKILL; one that is gone already will do."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def wait_for_exit(process: psutil.Process) -> None:
    """Wait until all threads of a killed process have ended; init may take note seconds later."""
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        if not process.is_running():
            return
        descriptor = os.pidfd_open(process.pid)
        try:
            waiting = select.poll()  # which takes descriptors of any number
            waiting.register(descriptor, select.POLLIN)
            waiting.poll(KILL_TIMEOUT_S * 1000)
        finally:
            os.close(descriptor)


SERVER_PROGRAM = Path(fork_server_main.__file__)
MAX_SERVERS = 3  # of one process, 300 MB each; one for each set of what only a new process heeds
REPLY_TIMEOUT_S = 120.0  # for the first agent, which waits for the imports


class AgentForkServer:
    """One process that forks agents. Make it through `start`."""

    def __init__(self, env: Mapping[str, str], program: Path | None = None) -> None:
        """Start it; it imports while its first agent is asked for. ``program``: default `brood`."""
        self._connection, its = socket.socketpair()
        self._lock = threading.Lock()
        with its:
            self._process = start_with_lasting_parent(
                lambda: subprocess.Popen(
                    [sys.executable, "-u", program or SERVER_PROGRAM, str(its.fileno()), str(os.getpid())],
                    pass_fds=(its.fileno(),),
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
    ) -> fork_server_main.ForkedProcess:
        """Fork an agent; ``more`` is for programs other than `brood`.

        Raises:
            OSError, EOFError: the process is gone.

        """
        asked = {
            "command": command,
            "env": {
                os.fsencode(k).decode("latin-1"): os.fsencode(v).decode("latin-1") for k, v in env.items()
            },
            "cwd": str(cwd),
            "network": network,
            **more,
        }
        return fork_server_main.ForkedProcess(int(self._request(asked, [output])["pid"]), self._reap)

    def _reap(self, pid: int) -> int | None:
        if (
            self.alive and fork_server_main.has_ended(pid) is False
        ):  # a thousand looks need not be answered over there
            return None
        try:
            code: int | None = self._request({"reap": pid})["code"]
        except (OSError, EOFError):
            return -9  # it took all that it had forked along
        return code

    def _request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send a question, and receive its answer.

        One that is interrupted in between, by Ctrl-C or a test's time limit, ends the nursery: the next would
        take that answer for its own, and what was forked would be nobody's.
        """
        with self._lock:
            try:
                fork_server_main.send(self._connection, message, descriptors)
                return fork_server_main.receive(self._connection)[0]
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the process, and with it all that it has forked."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None


_servers: dict[frozenset[tuple[str, str]], AgentForkServer] = {}
_lock = threading.Lock()


def start(
    command: list[str],
    env: Mapping[str, str],
    output: IO[bytes],
    *,
    cwd: Path | None = None,
    network: str = "",
) -> fork_server_main.ForkedProcess | None:
    """Fork ``command``, which is ``python -m …``; None where it has to be started as a new process.

    Args:
        command: what is run.
        env: its environment.
        output: where it prints to.
        cwd: the folder in which it is to run; None: this process's.
        network: path of the network namespace in which it is to run; empty: this process's.

    """
    heeded = {
        name: value
        for name, value in env.items()
        if name.startswith(validation.PROCESS_START_ENV_PREFIXES) and name != constants.ENV_FAILPOINTS
    }
    with _lock:
        nursery = _servers.get(frozenset(heeded.items()))
        if nursery is None or not nursery.alive:
            if nursery is None and len(_servers) >= MAX_SERVERS:
                return None
            kept = {k: v for k, v in env.items() if not k.startswith("ELASTIC_RESUME_") and k != "TMPDIR"}
            kept.update({k: v for k, v in os.environ.items() if k == "TMPDIR"})  # it outlives those nodes
            nursery = _servers[frozenset(heeded.items())] = AgentForkServer(kept)
            atexit.register(nursery.close)
    with contextlib.suppress(OSError, EOFError):
        return nursery.fork(command, env, output.fileno(), cwd=cwd or Path.cwd(), network=network)
    return None
