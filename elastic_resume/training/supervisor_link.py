"""Talk with this process's worker supervisor: park between two generations, and go on in the next.

A *parked* worker runs no step and holds no lease. Its supervisor keeps it while torchelastic ends one
launcher shim and starts the next. Lines of text, over a socket that the supervisor has made::

    worker --restartable, unrestartable--> supervisor   whether it can park
    worker --waiting N--> supervisor                    a collective has failed: is the generation over?
    supervisor --park--> worker                         it is: park within two seconds, or be killed
    worker --parked--> supervisor
    supervisor --resume N, environment--> worker        the next generation; three streams come with it

Under another launcher there is no supervisor, and no worker parks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from elastic_resume import constants
from elastic_resume.errors import ElasticResumeError
from elastic_resume.local_socket import read_peer

STREAMS = 3
AGENT_POLL_INTERVAL_S = 1.0
# What launchers tell a worker about its place in the world; the script may have set all other variables.
LAUNCHER_VARIABLES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
LAUNCHER_PREFIXES = ("TORCHELASTIC_", constants.ENV_PREFIX)


class SupervisorLink:
    """The connection to the supervisor, and a thread that reads from it."""

    def __init__(self, connection: socket.socket) -> None:
        self.is_world_over = threading.Event()
        """Set from the request to park until the next generation."""
        self._connection = connection
        self._on_world_over: Callable[[], None] = lambda: None
        self._next_environment: dict[str, str] | None = None
        self._resumed = threading.Event()
        self._pid = os.getpid()
        self._agent_path = Path(os.environ.get(constants.ENV_PARKED, os.devnull))
        self._agent_file: os.stat_result | None = None
        with contextlib.suppress(OSError):  # no agent, or the script has changed its user
            self._agent_file = self._agent_path.stat()
        thread = threading.Thread(target=self._read, name="elastic-resume-supervisor", daemon=True)
        thread.start()

    def allow_parking(self, on_world_over: Callable[[], None]) -> None:
        """Let the supervisor request parking; ``on_world_over`` is called in the reading thread.

        It ends before the next generation is read, so that it cannot disturb that one.
        """
        self._on_world_over = on_world_over
        self._send(b"restartable\n")

    def forbid_parking(self) -> None:
        """Let the supervisor kill this process, in place of a request to park."""
        self._send(b"unrestartable\n")

    def await_world_end(self, timeout_s: float) -> bool:
        """Wait for the end of the generation, after a collective has failed; return whether it is over."""
        self._send(f"waiting {timeout_s}\n".encode())
        return self.is_world_over.wait(timeout_s)

    def park(self) -> None:
        """Wait for the next generation. Then the environment and the standard streams are those of it.

        The environment changes in what launchers set, and keeps what the script has set.
        """
        self._resumed.clear()
        self._send(b"parked\n")
        polls_without_agent = 0
        while not self._resumed.wait(AGENT_POLL_INTERVAL_S):  # with a limit, so that signal handlers run
            polls_without_agent += self._has_agent_ended()
            if polls_without_agent > 1:  # the supervisor had the time to end this process, so it is stopped
                self._end_with_supervisor()
        environment, self._next_environment = self._next_environment or {}, None
        for name in {*os.environ, *environment}:
            if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES):
                continue
            if name in environment:
                os.environ[name] = environment[name]
            else:
                del os.environ[name]

    def _has_agent_ended(self) -> bool:
        try:
            return self._agent_file is not None and not os.path.samestat(
                self._agent_path.stat(), self._agent_file
            )
        except OSError as error:
            return isinstance(error, FileNotFoundError)

    def _end_with_supervisor(self) -> NoReturn:
        supervisor, _ = read_peer(self._connection)
        with contextlib.suppress(OSError):
            if supervisor > 0:  # else it is in another PID namespace
                os.kill(supervisor, signal.SIGKILL)
        os._exit(1)

    def _send(self, line: bytes) -> None:
        if os.getpid() == self._pid:  # a forked child is another process
            with contextlib.suppress(OSError):  # without its supervisor the kernel kills this process
                self._connection.sendall(line)

    def _read(self) -> None:
        unread, streams = b"", list[int]()
        # When this thread ends, the closed socket has the supervisor kill this process in place of parking.
        with self._connection, contextlib.suppress(OSError, ValueError):
            while True:
                data, received, _, _ = socket.recv_fds(self._connection, 65536, STREAMS)
                if not data:
                    return
                unread += data
                streams += received
                unread = self._handle(unread, streams)

    def _handle(self, unread: bytes, streams: list[int]) -> bytes:
        """Handle all complete messages; return the rest."""
        while b"\n" in unread:
            line, rest = unread.split(b"\n", 1)
            word, *arguments = line.split()
            if word == b"resume":
                size = int(arguments[0])
                if len(rest) < size:
                    return unread
                self._take_environment(rest[:size], streams)
                unread = rest[size:]
            elif word == b"park":
                self.is_world_over.set()
                self._on_world_over()
                unread = rest
            else:
                raise ValueError(f"the supervisor sent {line!r}")
        return unread

    def _take_environment(self, encoded: bytes, streams: list[int]) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
            os.close(descriptor)
        streams.clear()
        self._next_environment = json.loads(encoded)
        self.is_world_over.clear()  # here, because the next request to park may follow at once
        self._resumed.set()


_link: SupervisorLink | None = None


def open_link() -> SupervisorLink | None:
    """Return this process's link to its supervisor; None under another launcher."""
    global _link  # noqa: PLW0603 - one socket per process
    number = os.environ.pop(constants.ENV_SUPERVISOR_FD, "")
    if _link is None and number.isdigit():
        try:
            _link = SupervisorLink(socket.socket(fileno=int(number)))
        except OSError as error:
            raise ElasticResumeError(
                f"the script has closed the socket to its supervisor: {error}."
            ) from None
        os.set_inheritable(int(number), False)
    return _link if _link is None or _link._pid == os.getpid() else None  # noqa: SLF001
