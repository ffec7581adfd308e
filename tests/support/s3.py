"""A real S3 server on the loopback (moto), and a proxy before it that injects faults."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

BUCKET = "bucket"
SLOW_BYTES_PER_S = 100_000
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def s3_environment(port: int) -> dict[str, str]:
    """Return the variables by which a process finds the server at ``port``."""
    return {
        "AWS_ACCESS_KEY_ID": "AKIATESTONLY",
        "AWS_SECRET_ACCESS_KEY": "only-for-tests",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "NO_PROXY": "127.0.0.1",
    }


@contextlib.contextmanager
def serve_s3(bucket: str = BUCKET) -> Iterator[int]:
    """Run a server with an empty bucket in a process of its own; yield its port."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            assert request(port, "PUT", f"/{bucket}") == 200
            yield port
        finally:
            process.stdin.close()
            process.terminate()


def request(port: int, method: str, path: str, body: bytes = b"") -> int:
    """Send an unsigned request, which moto accepts; return the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status
    finally:
        connection.close()


@dataclass
class Fault:
    """What happens to the next ``times`` requests of ``method`` whose path contains ``path``.

    ``action`` is a status with a code ("403 AccessDenied"), which the proxy answers by itself, or

    - slow: body and answer pass at `SLOW_BYTES_PER_S`
    - cut: the connection ends in the middle of the answer
    - truncated: the answer is half as long, and says so
    - wrong: one bit of the answer is flipped
    - lost: the server gets the request, and the connection ends without an answer
    - hang: no answer ever comes
    """

    method: str
    path: str
    action: str
    times: int = 1_000_000


@dataclass
class FaultProxy:
    """Passes requests to the server at ``port``, but for those of `faults`; `requests` counts all."""

    port: int
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_action(self, method: str, path: str) -> str:
        """Count a request, and return what is to happen to it."""
        with self.lock:
            self.requests.append(f"{method} {path}")
            for fault in self.faults:
                if fault.times > 0 and fault.method in {method, "*"} and fault.path in path:
                    fault.times -= 1
                    return fault.action
        return ""

    @contextlib.contextmanager
    def serve(self) -> Iterator[int]:
        """Yield the proxy's port."""
        server = _Server(("127.0.0.1", 0), _Handler)
        server.proxy = self
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.closing.set()
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    proxy: FaultProxy
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.closing = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that give up are the point."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name in the base class
        """Say nothing."""

    def handle_request(self) -> None:
        """Answer one request."""
        server = cast("_Server", self.server)
        action = server.proxy.take_action(self.command, self.path)
        body = self._read_body(action == "slow")
        if len(body) < int(self.headers.get("Content-Length") or 0):  # the client has given up
            self._close()
            return
        if action == "hang":
            server.closing.wait()
            self._close()
            return
        if action[:1].isdigit():
            status, _, code = action.partition(" ")
            text = f"<Error><Code>{code}</Code><Message>HIDDEN-ANSWER</Message></Error>"
            self._answer(int(status), [], b"" if self.command == "HEAD" else text.encode(), "")
            return
        connection = http.client.HTTPConnection("127.0.0.1", server.proxy.port)
        connection.request(self.command, self.path, body, dict(self.headers))
        response = connection.getresponse()
        data = response.read()
        headers = [(k, v) for k, v in response.getheaders() if k.lower() not in _HOP_HEADERS]
        connection.close()
        if action == "lost":
            self._close()
            return
        if self.command == "HEAD":
            headers.append(("Content-Length", response.headers.get("Content-Length", "0")))
        self._answer(response.status, headers, data, action)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_request  # noqa: N815  names of the base class

    def _read_body(self, is_slow: bool) -> bytes:
        left, body = int(self.headers.get("Content-Length") or 0), bytearray()
        while left:
            piece = self.rfile.read(min(left, SLOW_BYTES_PER_S // 10 if is_slow else left))
            if not piece:
                break
            body += piece
            left -= len(piece)
            if is_slow:
                time.sleep(0.1)
        return bytes(body)

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, action: str) -> None:
        if action == "wrong":
            data = bytes([data[0] ^ 1]) + data[1:]
        if action == "truncated":
            data = data[: len(data) // 2]
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if action == "cut":
            self.wfile.write(data[: len(data) // 2])
            self._close()
            return
        step = SLOW_BYTES_PER_S // 10 if action == "slow" else max(1, len(data))
        for start in range(0, len(data), step):
            self.wfile.write(data[start : start + step])
            if action == "slow":
                time.sleep(0.1)

    def _close(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


_HOP_HEADERS = {"connection", "content-length", "transfer-encoding", "date", "server"}
