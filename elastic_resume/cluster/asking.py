"""One question over HTTP to the metadata address of a cloud machine.

Promise: an answer comes within the time given, headers and body together, and of at most `MAX_BYTES`, or
`AskError` says in one clause why not. No proxy of the environment is used (it would answer for another
machine), no redirect is followed, nothing is kept open. What is not bounded is the resolver's time to look up
a name. Does not know what is asked.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

TIMEOUT_S = 2.0
MAX_BYTES = 64 * 1024
PIECE_BYTES = 16 * 1024
MAX_SHORT = 200
_PLAIN = re.compile(r"[!-~]+")
"""Of a request's line: a space or a line's end in it would begin another request."""


class AskError(Exception):
    """There is no answer; the text is a clause for people."""


@dataclass(frozen=True)
class Answer:
    """A whole answer, whatever its status."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The body, of whatever bytes."""
        return self.body.decode(errors="replace").strip()


def short(text: str) -> str:
    """The beginning of what somebody else says, as one line of what can be printed."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * MAX_SHORT])
    return " ".join(line.split())[:MAX_SHORT]


class _Stream(io.RawIOBase):
    """What a socket says until a moment, and up to so many bytes: a slow drip would outlast any time-out."""

    def __init__(self, connection: socket.socket, until: float, budget: int) -> None:
        self._connection = connection
        self._until = until
        self._budget = budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._connection.settimeout(_left(self._until))
        count = self._connection.recv_into(buffer)
        self._budget -= count
        if self._budget < 0:
            raise AskError("it answers more than it may")
        return count

    def makefile(self, _mode: str) -> io.BufferedReader:
        """What `http.client` asks of a socket."""
        return io.BufferedReader(self, 8192)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def ask(
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Ask ``url``, which is plain http, and return the whole answer.

    Raises:
        AskError: nobody answers in time, or what comes is no answer.

    """
    until = time.monotonic() + timeout_s
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise AskError(f"{url!r} is no address to ask")
        request = _request(method, parts, headers or {})
        address = (parts.hostname, parts.port or 80)
        with socket.create_connection(address, _left(until)) as connection:
            connection.settimeout(_left(until))
            connection.sendall(request)
            return _read(_Stream(connection, until, MAX_BYTES), method)
    except TimeoutError:
        raise AskError(f"no answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise AskError(short(str(error)) or type(error).__name__) from error


def _request(method: str, parts: SplitResult, headers: Mapping[str, str]) -> bytes:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"Host: {parts.netloc}", "Connection: close", *(f"{k}: {v}" for k, v in headers.items())]
    if method != "GET":
        lines.append("Content-Length: 0")
    if not _PLAIN.fullmatch(target) or any("\r" in line or "\n" in line for line in lines):
        raise AskError("the question is no line of text")
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("latin-1")


def _read(stream: _Stream, method: str) -> Answer:
    # It asks a socket for nothing but its file.
    with http.client.HTTPResponse(stream, method=method) as response:  # type: ignore[arg-type]
        response.begin()
        body = b""
        # In pieces: for a whole body as much memory is taken at once as its sender says that it has.
        while piece := response.read(PIECE_BYTES):
            body += piece
        if response.length:
            raise AskError("the answer breaks off")
        return Answer(response.status, body)
