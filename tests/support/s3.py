"""A real S3 server on the loopback (moto), and a proxy before it that injects faults."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

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
    _closing: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def serve(self) -> Iterator[int]:
        """Yield the proxy's port."""
        server = make_server(
            "127.0.0.1", 0, Request.application(self._answer), threaded=True, request_handler=_Handler
        )
        server.daemon_threads = True  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server.port
        finally:
            self._closing.set()
            server.shutdown()
            server.server_close()
            thread.join()

    def _take_action(self, method: str, path: str) -> str:
        """Count a request, and return what is to happen to it."""
        with self.lock:
            self.requests.append(f"{method} {path}")
            for fault in self.faults:
                if fault.times > 0 and fault.method in {method, "*"} and fault.path in path:
                    fault.times -= 1
                    return fault.action
        return ""

    def _answer(self, request: Request) -> Response:
        path = request.environ["RAW_URI"]
        action = self._take_action(request.method, path)
        pieces = iter(partial(request.stream.read, SLOW_BYTES_PER_S // 10), b"")
        body = b"".join(_delay(pieces) if action == "slow" else pieces)
        if action == "hang":
            self._closing.wait()
            raise ConnectionError
        if action[:1].isdigit():
            status, _, code = action.partition(" ")
            return Response(
                f"<Error><Code>{code}</Code><Message>HIDDEN-ANSWER</Message></Error>", int(status)
            )
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(request.method, path, body, dict(request.headers))
        answer = connection.getresponse()
        data, headers = answer.read(), dict(answer.getheaders())
        connection.close()
        if action == "lost":
            raise ConnectionError
        if action == "wrong":
            data = bytes([data[0] ^ 1]) + data[1:]
        if action == "truncated":
            data = data[: len(data) // 2]
        if request.method != "HEAD":
            headers["Content-Length"] = str(len(data))
        sent: Iterable[bytes] = {"slow": _delay(_divide(data)), "cut": _cut(data)}.get(action, [data])
        return Response(sent, answer.status, headers, direct_passthrough=True)


class _Handler(WSGIRequestHandler):
    """Closes a connection whose request raises ConnectionError, and is quiet."""

    def connection_dropped(self, error: BaseException, environ: object = None) -> None:
        del error, environ
        self.close_connection = True

    def log(self, type: str, message: str, *args: object) -> None:  # noqa: A002  the name in the base class
        """Say nothing: clients that give up are the point."""


def _divide(data: bytes) -> Iterator[bytes]:
    step = SLOW_BYTES_PER_S // 10
    yield from (data[start : start + step] for start in range(0, len(data), step))


def _delay(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        time.sleep(0.1)


def _cut(data: bytes) -> Iterator[bytes]:
    yield data[: len(data) // 2]
    raise ConnectionError
