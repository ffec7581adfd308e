"""Poll for preemption notices: a cloud's metadata server, or a file.

Each `NoticeSource` is polled every few seconds and returns a `PreemptionNotice` or None. A source that cannot
be asked or understood raises `NoticeQueryError`; it is never taken for a notice, because some addresses
answer everything with HTML. Advice to move, such as EC2's rebalance recommendation, is no notice either.

The formats are those of the clouds' documentation: EC2's instance metadata service with session tokens
(IMDSv2, ``spot/instance-action``), Compute Engine's ``instance/preempted``, Azure's scheduled events. A
request uses no proxy and follows no redirect. Its time limit holds for each wait for data, and a response has
at most `MAX_BYTES`. `watcher` acts on a notice.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from elastic_resume.errors import ConfigError

TIMEOUT_S = 2.0
MAX_BYTES = 64 * 1024
MAX_QUOTED_CHARS = 200
POLL_S = 5.0  # AWS advises 5 s; the shortest notice of any cloud is 30 s
FILE_POLL_S = 1.0
EC2_TOKEN_TTL_S = 21600  # the longest lifetime that EC2 accepts
METADATA_URL = "http://169.254.169.254"  # the address is the same on all three clouds


class NoticeQueryError(Exception):
    """A source gave no answer; the text is a clause for the log."""


class HttpResponse(NamedTuple):
    """A complete response, whatever its status; undecodable bytes are replaced."""

    status: int
    text: str


def quote_briefly(text: str) -> str:
    """Return the beginning of a foreign text as one printable line."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * MAX_QUOTED_CHARS])
    return " ".join(line.split())[:MAX_QUOTED_CHARS]


def request_metadata(
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> HttpResponse:
    """Request ``url`` over plain HTTP and return the complete response.

    Raises:
        NoticeQueryError: there is no answer in time, or no valid one.

    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(method, target, headers=dict(headers or {}))
        with connection.getresponse() as response:
            body = response.read(MAX_BYTES + 1)
            if len(body) > MAX_BYTES:
                raise NoticeQueryError(f"the answer has more than {MAX_BYTES} bytes")
            if response.length:
                raise NoticeQueryError("the answer breaks off")
            return HttpResponse(response.status, body.decode(errors="replace").strip())
    except TimeoutError:
        raise NoticeQueryError(f"no answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoticeQueryError(quote_briefly(str(error)) or type(error).__name__) from error
    finally:
        connection.close()


@dataclass(frozen=True)
class PreemptionNotice:
    """This node will be taken away; ``deadline`` is the Unix time, if known."""

    reason: str
    deadline: float | None = None


@dataclass(frozen=True)
class NoticeSource:
    """One source of notices; its ``poll`` raises NoticeQueryError if the source cannot be asked."""

    name: str
    poll: Callable[[], PreemptionNotice | None]
    poll_interval_s: float = POLL_S
    hint: str = ""
    """What to do before the node starts again."""


def parse_source(setting: str, text: str) -> NoticeSource | None:
    """Parse a source; None for ``off``. ``setting`` names the value's source for errors.

    Raises:
        ConfigError: the source is unknown, or its path is missing.

    """
    word = text.strip()
    if word in {"", "off"}:
        return None
    cloud = {"aws": Ec2Metadata, "gcp": ComputeEngineMetadata, "azure": AzureMetadata}.get(word)
    if cloud is not None:
        return NoticeSource(word, cloud(METADATA_URL).poll)
    kind, _, rest = word.partition(":")
    if kind == "file" and rest:
        path = Path(rest).expanduser().absolute()
        hint = f" Remove {path} before the node starts again, or it leaves again."
        return NoticeSource(word, lambda: poll_file(path), FILE_POLL_S, hint)
    raise ConfigError(f"{setting} is {text[:MAX_QUOTED_CHARS]!r}: write aws, gcp, azure or file:PATH.")


# ---- clouds --------------------------------------------------------------------------------------------


@dataclass
class Ec2Metadata:
    """EC2's spot interruption notice. The session token is renewed when it is refused."""

    base_url: str
    _token: str = field(default="", repr=False)

    def poll(self) -> PreemptionNotice | None:
        """Ask for a notice; EC2 gives it two minutes ahead."""
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
                raise NoticeQueryError("the metadata server returned no valid token")
            self._token = token
        headers = {"X-aws-ec2-metadata-token": self._token}
        return request_metadata(f"{self.base_url}/latest/meta-data/spot/instance-action", headers=headers)


def parse_ec2_notice(text: str) -> PreemptionNotice:
    """Parse ``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``."""
    fields = _parse_object(text)
    action = str(fields.get("action"))
    if action not in {"terminate", "stop", "hibernate"}:
        raise NoticeQueryError(f"spot/instance-action is {quote_briefly(text)!r}")
    deadline = None
    with contextlib.suppress(ValueError):
        time_utc = datetime.strptime(str(fields.get("time", "")), "%Y-%m-%dT%H:%M:%SZ")
        deadline = time_utc.replace(tzinfo=timezone.utc).timestamp()
    return PreemptionNotice(f"EC2 will {action} this spot instance", deadline)


@dataclass
class ComputeEngineMetadata:
    """Compute Engine's notice that a spot instance is being preempted."""

    base_url: str

    def poll(self) -> PreemptionNotice | None:
        """Ask for a notice; Compute Engine gives it 30 s ahead."""
        url = f"{self.base_url}/computeMetadata/v1/instance/preempted"
        answer = request_metadata(url, headers={"Metadata-Flavor": "Google"})
        return parse_gcp_notice(_require_ok(answer, "instance/preempted").text)


def parse_gcp_notice(text: str) -> PreemptionNotice | None:
    """Parse ``TRUE`` or ``FALSE``."""
    if text.upper() not in {"TRUE", "FALSE"}:
        raise NoticeQueryError(f"instance/preempted is {quote_briefly(text)!r}")
    return PreemptionNotice("Compute Engine preempts this instance") if text.upper() == "TRUE" else None


@dataclass
class AzureMetadata:
    """Azure's scheduled events that take this machine away. Azure lists the events of the whole scale set."""

    base_url: str
    _name: str = ""

    def poll(self) -> PreemptionNotice | None:
        """Ask for events; Azure gives them 30 s or more ahead."""
        headers = {"Metadata": "true"}
        if not self._name:
            url = f"{self.base_url}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = _require_ok(request_metadata(url, headers=headers), "this machine's name").text
        url = f"{self.base_url}/metadata/scheduledevents?api-version=2020-07-01"
        answer = request_metadata(url, headers=headers)
        return parse_azure_notice(_require_ok(answer, "scheduledevents").text, self._name)


def parse_azure_notice(text: str, name: str) -> PreemptionNotice | None:
    """Parse the list of events; Preempt and Terminate of this machine are notices."""
    events = _parse_object(text).get("Events")
    if not isinstance(events, list):
        raise NoticeQueryError(f"scheduledevents is {quote_briefly(text)!r}")
    for event in events:
        if not isinstance(event, dict) or str(event.get("EventType")) not in {"Preempt", "Terminate"}:
            continue
        machines = event.get("Resources")
        names = [str(machine).lower() for machine in machines] if isinstance(machines, list) else []
        if name.lower() not in names or str(event.get("EventStatus")) in {"Canceled", "Completed"}:
            continue
        deadline = None
        with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
            deadline = parsedate_to_datetime(str(event.get("NotBefore"))).timestamp()
        return PreemptionNotice(f"Azure: {event['EventType']} of this machine", deadline)
    return None


def _require_ok(answer: HttpResponse, requested: str) -> HttpResponse:
    if answer.status != 200:
        raise NoticeQueryError(f"the answer to the request for {requested} is {answer.status}")
    return answer


def _parse_object(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise NoticeQueryError(f"the answer is no JSON object: {quote_briefly(text)!r}")
    return fields


# ---- files --------------------------------------------------------------------------------


def poll_file(path: Path) -> PreemptionNotice | None:
    """Return a notice if the file exists; its text is the reason.

    A file from before this machine booted is left over from an earlier notice and is ignored.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NoticeQueryError(f"{error.strerror}") from error
    if status.st_mtime < psutil.boot_time():
        raise NoticeQueryError(f"{path} is older than this machine's start, and no notice: remove it")
    text = ""
    if stat.S_ISREG(status.st_mode):  # opening a named pipe would block
        with contextlib.suppress(OSError), open(path, "rb") as file:
            text = file.read(MAX_BYTES).decode(errors="replace")
    return PreemptionNotice(quote_briefly(text) or f"{path} is there")
