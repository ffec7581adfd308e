"""The process that serves pages about a job that runs; `agent.pages` starts it, and says what it may know.

    /             the report's page, live, with how the job stands above it
    /status.json  the agent's document (`agent.document`)
    /metrics      for Prometheus, where that was asked for

Every page asks for the password: as a bearer token, or as HTTP basic's with any user name, so that a browser
can ask for it. Promise: it changes nothing. Connections, their time and what they may send are bounded; those
who have shown no password make room for others. The process ends with its agent.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ctypes
import hashlib
import hmac
import http.server
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast

from elastic_resume import contract
from elastic_resume.errors import ElasticResumeError, RendezvousLostError
from elastic_resume.report import asking, live, metrics

MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 16 * 1024
READ_S = 5.0
"""So long may a visitor take to show the password."""
WHOLE_S = 30.0
"""So long may a connection last from then on."""
MAX_MEMORY_BYTES = 768 << 20
STACK_BYTES = 2 << 20
NICENESS = 10
PR_SET_PDEATHSIG = 1


class Server(http.server.ThreadingHTTPServer):
    """Serves on a socket that somebody else listens with."""

    daemon_threads = True

    def __init__(
        self, listener: socket.socket, password: str, pages: Pages, beat: Callable[[], object]
    ) -> None:
        """``password``: the hexadecimal SHA-256 of what opens the pages; ``beat``: called twice a second."""
        super().__init__(listener.getsockname(), Visit, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.password = password
        self.pages = pages
        self._beat = beat
        self._strangers: dict[Any, float] = {}  # and until when each may stay, the oldest first
        self._guests: dict[Any, float] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take one more; where there is no room the oldest goes that has not shown the password."""
        with self._lock:
            is_room = len(self._guests) < MAX_CONNECTIONS
            if is_room and len(self._guests) + len(self._strangers) >= MAX_CONNECTIONS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _hang_up(oldest)
            if is_room:
                self._strangers[request] = time.monotonic() + READ_S
        if is_room:
            super().process_request(request, client_address)
        else:
            super().shutdown_request(request)

    def trust(self, request: Any) -> None:
        """It has shown the password."""
        with self._lock:
            if self._strangers.pop(request, None) is not None:
                self._guests[request] = time.monotonic() + WHOLE_S

    def shutdown_request(self, request: Any) -> None:
        """Close one."""
        with self._lock:
            self._strangers.pop(request, None)
            self._guests.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second tell the agent that we live, and end those that last too long.

        A peer may send a byte now and then for ever.
        """
        self._beat()
        now = time.monotonic()
        with self._lock:
            everybody = (*self._strangers.items(), *self._guests.items())
        for request in [request for request, until in everybody if now > until]:
            _hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A visitor that hangs up, or a fault of ours, is told to nobody: there is no log to fill."""


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class Visit(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version = "elastic_resume"
    sys_version = ""
    timeout = READ_S

    def setup(self) -> None:
        """Bound what the head of a request may hold."""
        super().setup()
        self.rfile = cast("Any", _Bounded(self.rfile, MAX_HEAD_BYTES))

    def do_GET(self) -> None:
        """Answer, if the password is right."""
        if not self._may():
            self._send(
                HTTPStatus.UNAUTHORIZED,
                b"Password required: the contents of http-token in the node's directory.\n",
                "text/plain; charset=utf-8",
            )
            return
        self.server.trust(self.request)
        page = self.path.partition("?")[0]
        try:
            status, body, kind = self.server.pages.get(page)
        except RendezvousLostError as error:
            status, body, kind = (
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{error}\n".encode(),
                "text/plain; charset=utf-8",
            )
        except Exception as error:  # noqa: BLE001 - a fault of ours is the visitor's to read
            status, body = (
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"a fault of elastic_resume: {error!r}\n".encode(),
            )
            kind = "text/plain; charset=utf-8"
        self._send(status, body, kind)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Basic realm="elastic_resume", charset="UTF-8"')
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _may(self) -> bool:
        scheme, _, said = self.headers.get("Authorization", "").partition(" ")
        given = said.strip().encode("latin-1", "replace")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(hashlib.sha256(given).hexdigest(), self.server.password)

    def log_message(self, *_: Any) -> None:
        """Say nothing: what visitors send belongs in no log."""


class _Bounded:
    """A file of which so many bytes are read, and no more."""

    def __init__(self, file: BufferedIOBase, left: int) -> None:
        self._file = file
        self._left = left

    def readline(self, size: int = -1) -> bytes:
        line = self._file.readline(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(line)
        if self._left <= 0:
            raise ConnectionAbortedError("more than a request's head holds")
        return line

    def close(self) -> None:
        self._file.close()


class Pages:
    """What there is to be seen."""

    def __init__(self, node_dir: Path, *, port: int, with_metrics: bool) -> None:
        """``node_dir``: of this node, in which its agent has left word where it listens; ``port``: ours."""
        self._node_dir = node_dir
        self._with_metrics = with_metrics
        self._report = live.Report(node_dir, port)

    def get(self, path: str) -> tuple[HTTPStatus, bytes, str]:
        """Give status, body and content type of a page.

        Raises:
            RendezvousLostError: the agent does not answer.

        """
        if path == "/":
            return HTTPStatus.OK, self._report.page(self._said_or_why()).encode(), "text/html; charset=utf-8"
        if path == "/status.json":
            return HTTPStatus.OK, json.dumps(self._said()).encode(), "application/json"
        if path == "/metrics" and self._with_metrics:
            body, kind = metrics.exposition(self._said(), self._report.parts())
            return HTTPStatus.OK, body, kind
        told = "Pages here: / and /status.json"
        told += " and /metrics.\n" if self._with_metrics else "; /metrics with --metrics.\n"
        return HTTPStatus.NOT_FOUND, told.encode(), "text/plain; charset=utf-8"

    def _said(self) -> dict[str, Any]:
        job = asking.read_look(self._node_dir / contract.LOOK_FILE)
        if job is None:
            raise RendezvousLostError(
                "this node's agent has not taken its place in the job yet, or has ended."
            )
        return job.ask_first()

    def _said_or_why(self) -> dict[str, Any] | str:
        try:
            return self._said()
        except ElasticResumeError as error:
            return str(error)


def main() -> None:
    """Serve, until the agent that has started this process ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # what a scheduler sends to all processes; the agent heeds it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # before training
    with contextlib.suppress(ValueError, OSError):  # a hard limit that is lower does as well
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)  # of up to `MAX_CONNECTIONS` threads: all of it counts
    told: Mapping[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_agent, daemon=True).start()
    listener = socket.socket(fileno=told["descriptor"])
    port = listener.getsockname()[1]
    pages = Pages(Path(told["node_dir"]), port=port, with_metrics=told["metrics"])
    os.set_blocking(sys.stdout.fileno(), False)
    Server(listener, told["password"], pages, _beat).serve_forever()


def _beat() -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), b".")


def _end_with_agent() -> None:
    sys.stdin.read()
    os._exit(0)
