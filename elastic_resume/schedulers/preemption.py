"""Who says ahead of time that this node will be taken away: a cloud's metadata address, a file, a command.

Each `Source` is looked at every few seconds and answers with a `Notice`, or None while there is none.
What cannot be asked or understood raises `AskError` and is never taken for a notice: to leave for nothing
costs a node, and an address that answers everything with a page of HTML is not rare. Advice to move (EC2's
rebalance recommendation) is not a notice either.

The forms are those of the clouds' own documentation: EC2's instance metadata service with session tokens
(IMDSv2, ``spot/instance-action``), Compute Engine's ``instance/preempted``, Azure's scheduled events. Knows
no signals and no agent: what follows from a notice is `agent.preemption`'s.

One question over HTTP to the metadata address of a cloud machine.

Promise: an answer comes within the time given, headers and body together, and of at most `MAX_BYTES`, or
`AskError` says in one clause why not. No proxy of the environment is used (it would answer for another
machine), no redirect is followed, nothing is kept open. What is not bounded is the resolver's time to look up
a name. Does not know what is asked.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from elastic_resume.errors import ConfigError

TIMEOUT_S = 2.0
MAX_BYTES = 64 * 1024
CHUNK_BYTES = 16 * 1024
MAX_QUOTED_CHARS = 200
_REQUEST_TARGET_PATTERN = re.compile(r"[!-~]+")
"""Of a request's line: a space or a line's end in it would begin another request."""


class NoticeQueryError(Exception):
    """There is no answer; the text is a clause for people."""


@dataclass(frozen=True)
class HttpResponse:
    """A whole answer, whatever its status."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The body, of whatever bytes."""
        return self.body.decode(errors="replace").strip()


def quote_briefly(text: str) -> str:
    """The beginning of what somebody else says, as one line of what can be printed."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * MAX_QUOTED_CHARS])
    return " ".join(line.split())[:MAX_QUOTED_CHARS]


class _BoundedStream(io.RawIOBase):
    """What a socket says until a moment, and up to so many bytes: a slow drip would outlast any time-out."""

    def __init__(self, connection: socket.socket, until: float, budget: int) -> None:
        self._connection = connection
        self._until = until
        self._budget = budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._connection.settimeout(_remaining_s(self._until))
        count = self._connection.recv_into(buffer)
        self._budget -= count
        if self._budget < 0:
            raise NoticeQueryError("it answers more than it may")
        return count

    def makefile(self, _mode: str) -> io.BufferedReader:
        """What `http.client` asks of a socket."""
        return io.BufferedReader(self, 8192)


def _remaining_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def request_metadata(
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> HttpResponse:
    """Ask ``url``, which is plain http, and return the whole answer.

    Raises:
        AskError: nobody answers in time, or what comes is no answer.

    """
    until = time.monotonic() + timeout_s
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise NoticeQueryError(f"{url!r} is no address to ask")
        request = _build_request(method, parts, headers or {})
        address = (parts.hostname, parts.port or 80)
        with socket.create_connection(address, _remaining_s(until)) as connection:
            connection.settimeout(_remaining_s(until))
            connection.sendall(request)
            return _read_response(_BoundedStream(connection, until, MAX_BYTES), method)
    except TimeoutError:
        raise NoticeQueryError(f"no answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoticeQueryError(quote_briefly(str(error)) or type(error).__name__) from error


def _build_request(method: str, parts: SplitResult, headers: Mapping[str, str]) -> bytes:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"Host: {parts.netloc}", "Connection: close", *(f"{k}: {v}" for k, v in headers.items())]
    if method != "GET":
        lines.append("Content-Length: 0")
    if not _REQUEST_TARGET_PATTERN.fullmatch(target) or any("\r" in line or "\n" in line for line in lines):
        raise NoticeQueryError("the question is no line of text")
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("latin-1")


def _read_response(stream: _BoundedStream, method: str) -> HttpResponse:
    # It asks a socket for nothing but its file.
    with http.client.HTTPResponse(stream, method=method) as response:  # type: ignore[arg-type]
        response.begin()
        body = b""
        # In pieces: for a whole body as much memory is taken at once as its sender says that it has.
        while piece := response.read(CHUNK_BYTES):
            body += piece
        if response.length:
            raise NoticeQueryError("the answer breaks off")
        return HttpResponse(response.status, body)


POLL_S = 5.0  # as AWS advises; the shortest notice of any cloud is 30 s
FILE_POLL_S = 1.0
OLD_FILE_S = 60.0  # and the notice says for how long the file has been there
COMMAND_TIMEOUT_S = 5.0  # and then it is killed
COMMAND_POLL_S = 0.02  # between two looks at whether it has ended
EC2_TOKEN_TTL_S = 21600  # the longest that EC2 gives a session's token for
MAX_SOURCES = 8
METADATA_URLS = {
    "aws": "http://169.254.169.254",
    "gcp": "http://169.254.169.254",
    "azure": "http://169.254.169.254",
}
SOURCE_FORMATS = "aws, gcp, azure (each also NAME:http://ADDRESS), file:PATH or command:COMMAND"
_SOURCE_SEPARATOR = re.compile(r",\s*(?=(?:aws|gcp|azure)\s*(?:$|[,:])|file:|command:)")
"""Commas between sources; others belong to a path or a command."""


@dataclass(frozen=True)
class PreemptionNotice:
    """This node will be taken away. ``deadline``: when (seconds since the epoch), where that is told."""

    reason: str
    deadline: float | None = None


@dataclass(frozen=True)
class NoticeSource:
    """One place where notices are given: ``look`` raises AskError where it cannot be asked."""

    name: str
    poll: Callable[[], PreemptionNotice | None]
    poll_interval_s: float = POLL_S


def parse_sources(text: str | None) -> list[NoticeSource]:
    """Read ``--preemption-notice``: forms with commas between them; none for ``off`` and for nothing.

    Raises:
        ConfigError: a form is unknown, or its address, path or command cannot be one.

    """
    if text is None or text.strip() in {"", "off"}:
        return []
    words = [word.strip() for word in _SOURCE_SEPARATOR.split(text)]
    if len(words) > MAX_SOURCES:
        raise ConfigError(f"--preemption-notice names {len(words)} places; {MAX_SOURCES} are enough.")
    return [_parse_source(word) for word in words]


def _parse_source(word: str) -> NoticeSource:
    kind, colon, rest = word.partition(":")
    rest = rest.strip()
    if kind in METADATA_URLS and bool(colon) == bool(rest):
        base = _parse_base_url(word, rest) if rest else METADATA_URLS[kind]
        poll = {"aws": Ec2Metadata, "gcp": ComputeEngineMetadata, "azure": AzureMetadata}[kind](base).poll
        return NoticeSource(word, poll)
    if kind == "file" and rest:
        path = Path(rest).expanduser().absolute()
        return NoticeSource(word, lambda: poll_file(path), FILE_POLL_S)
    if kind == "command" and rest:
        try:
            argv = shlex.split(rest)
        except ValueError as error:
            raise ConfigError(f"--preemption-notice: {rest!r} is no command: {error}.") from error
        if not argv or shutil.which(argv[0]) is None:
            raise ConfigError(f"--preemption-notice: there is no program {argv[0] if argv else rest!r} here.")
        return NoticeSource(word, lambda: poll_command(argv))
    raise ConfigError(f"--preemption-notice is {word!r}: write {SOURCE_FORMATS}.")


def _parse_base_url(word: str, text: str) -> str:
    try:
        parts = urlsplit(text)
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_right = urlsplit(""), False
    plain = re.fullmatch(r"[!-~]+", text) and not (parts.query or parts.fragment or parts.username)
    if parts.scheme != "http" or not parts.hostname or not port_is_right or not plain:
        raise ConfigError(f"--preemption-notice is {word!r}: its address must be http://HOST[:PORT][/PATH].")
    return text.rstrip("/")


# ---- clouds --------------------------------------------------------------------------------------------


@dataclass
class Ec2Metadata:
    """EC2's spot interruption notice, by a session's token that is renewed when it is refused."""

    base_url: str
    _token: str = field(default="", repr=False)

    def poll(self) -> PreemptionNotice | None:
        """Ask; two minutes ahead of the interruption there is something."""
        answer = self._request_action()
        if answer.status == 401:
            self._token = ""
            answer = self._request_action()
        if answer.status == 404:
            return None
        return parse_ec2_notice(_require_ok(answer, "spot/instance-action").text)

    def _request_action(self) -> HttpResponse:
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(EC2_TOKEN_TTL_S)}
            token = _require_ok(
                request_metadata(f"{self.base_url}/latest/api/token", method="PUT", headers=headers),
                "a token",
            ).text
            if not re.fullmatch(r"[!-~]{1,4096}", token):
                raise NoticeQueryError("what it gives as a token is none")
            self._token = token
        headers = {"X-aws-ec2-metadata-token": self._token}
        return request_metadata(f"{self.base_url}/latest/meta-data/spot/instance-action", headers=headers)


def parse_ec2_notice(text: str) -> PreemptionNotice:
    """Read ``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``."""
    told = _parse_object(text)
    action = str(told.get("action"))
    if action not in {"terminate", "stop", "hibernate"}:
        raise NoticeQueryError(f"spot/instance-action says {quote_briefly(text)!r}")
    when = str(told.get("time", ""))
    deadline = None
    with contextlib.suppress(ValueError):
        at = datetime.strptime(when, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
        deadline = at.timestamp()
    return PreemptionNotice(f"EC2 will {action} this spot instance", deadline)


@dataclass
class ComputeEngineMetadata:
    """Compute Engine's word that a spot instance is being preempted: 30 s ahead of its end."""

    base_url: str

    def poll(self) -> PreemptionNotice | None:
        """Ask."""
        url = f"{self.base_url}/computeMetadata/v1/instance/preempted"
        return parse_gcp_notice(
            _require_ok(
                request_metadata(url, headers={"Metadata-Flavor": "Google"}), "instance/preempted"
            ).text
        )


def parse_gcp_notice(text: str) -> PreemptionNotice | None:
    """Read ``TRUE`` or ``FALSE``."""
    word = text.upper()
    if word not in {"TRUE", "FALSE"}:
        raise NoticeQueryError(f"instance/preempted says {quote_briefly(text)!r}")
    return PreemptionNotice("Compute Engine preempts this instance") if word == "TRUE" else None


@dataclass
class AzureMetadata:
    """Azure's scheduled events: those that take this machine away, out of all of its scale set's."""

    base_url: str
    _name: str = ""

    def poll(self) -> PreemptionNotice | None:
        """Ask; events are told 30 s and more ahead."""
        headers = {"Metadata": "true"}
        if not self._name:
            url = f"{self.base_url}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = _require_ok(request_metadata(url, headers=headers), "this machine's name").text
        url = f"{self.base_url}/metadata/scheduledevents?api-version=2020-07-01"
        return parse_azure_notice(
            _require_ok(request_metadata(url, headers=headers), "scheduledevents").text, self._name
        )


def parse_azure_notice(text: str, name: str) -> PreemptionNotice | None:
    """Read the list of events; of those that name this machine Preempt and Terminate end it."""
    told = _parse_object(text).get("Events")
    if not isinstance(told, list):
        raise NoticeQueryError(f"scheduledevents says {quote_briefly(text)!r}")
    for event in told:
        if not isinstance(event, dict) or str(event.get("EventType")) not in {"Preempt", "Terminate"}:
            continue
        machines = event.get("Resources")
        named = [str(one).lower() for one in machines] if isinstance(machines, list) else []
        if name.lower() not in named or str(event.get("EventStatus")) in {"Canceled", "Completed"}:
            continue
        deadline = None
        with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
            deadline = parsedate_to_datetime(str(event.get("NotBefore"))).timestamp()
        return PreemptionNotice(f"Azure: {event['EventType']} of this machine", deadline)
    return None


def _require_ok(answer: HttpResponse, what: str) -> HttpResponse:
    if answer.status != 200:
        raise NoticeQueryError(f"asked for {what} it answers {answer.status}")
    return answer


def _parse_object(text: str) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise NoticeQueryError(f"what it says is no JSON object: {quote_briefly(text)!r}")
    return told


# ---- files and commands --------------------------------------------------------------------------------


def read_boot_time(proc: Path = Path("/proc")) -> int:
    """Return when this machine was booted, in unix seconds by its own clock; 0 where nothing tells."""
    try:
        match = re.search(r"^btime ([0-9]{1,12})$", (proc / "stat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def poll_file(path: Path) -> PreemptionNotice | None:
    """A notice if there is such a file, whatever it is; its text, if it has any, is the reason.

    One from before this machine was booted is left over from its life before: each start would end by it.
    """
    try:
        told = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NoticeQueryError(f"{error.strerror}") from error
    if told.st_mtime < read_boot_time():
        raise NoticeQueryError(f"{path} is older than this machine's start, and no notice: remove it")
    text = ""
    if stat.S_ISREG(told.st_mode):  # to open a pipe would wait
        with contextlib.suppress(OSError), open(path, "rb") as file:
            text = file.read(MAX_BYTES).decode(errors="replace")
    age_s = time.time() - told.st_mtime
    old = f"; {path} has been there for {age_s / 60:.0f} min" if age_s > OLD_FILE_S else ""
    return PreemptionNotice((quote_briefly(text) or f"{path} is there") + old)


def poll_command(argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> PreemptionNotice | None:
    """A notice if the command ends with 0; its first line is the reason. Its process group ends with it."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise NoticeQueryError(f"it cannot be started: {error.strerror}") from error
    said = b""
    try:
        for data in _read_output(process, time.monotonic() + timeout_s):
            said = (said + data)[:MAX_BYTES]
    finally:
        with contextlib.suppress(OSError):  # gone, or another user's by now
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    lines = said.decode(errors="replace").splitlines()
    found = PreemptionNotice(quote_briefly(lines[0] if lines else "") or f"{argv[0]} says so")
    return found if process.returncode == 0 else None


def _read_output(process: subprocess.Popen[bytes], deadline: float) -> Iterator[bytes]:
    """Give what it prints until it has ended: a child that it leaves behind may keep the pipe open.

    Raises:
        AskError: it has not ended in time.

    """
    if process.stdout is None:
        return
    os.set_blocking(process.stdout.fileno(), False)
    is_open = True
    while True:
        ended = process.poll() is not None
        with contextlib.suppress(BlockingIOError):
            data = os.read(process.stdout.fileno(), MAX_BYTES) if is_open else b""
            is_open = bool(data)
            yield data
        if ended:
            return
        if time.monotonic() > deadline:
            raise NoticeQueryError("it did not end in time, and was killed")
        if is_open:
            select.select([process.stdout], [], [], COMMAND_POLL_S)
        else:
            time.sleep(COMMAND_POLL_S)
