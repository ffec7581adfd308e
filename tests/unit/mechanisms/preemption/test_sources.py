"""Preemption notices: parsing, sources, misbehaving addresses, and the drain that follows."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from elastic_resume.errors import ConfigError
from elastic_resume.mechanisms.preemption import sources as notices
from elastic_resume.mechanisms.preemption.announcer import Announcer
from elastic_resume.mechanisms.preemption.sources import (
    MAX_BYTES,
    MAX_QUOTED_CHARS,
    NoticeQueryError,
    NoticeSource,
    PreemptionNotice,
    parse_source,
    request_metadata,
)
from tests.support.agent_parts import make_agent_context
from tests.support.paths import SCRIPTS
from tests.support.rendezvous_nodes import TIMEOUT_S

pytestmark = pytest.mark.slow

TRAIN = SCRIPTS / "train.py"
TIME = "2017-09-18T08:22:00Z"
AT = 1505722920.0
MACHINE = {"EventStatus": "Scheduled", "Resources": ["VM_3"], "NotBefore": "Mon, 18 Sep 2017 08:22:00 GMT"}


# ---- parsing ---------------------------------------------------------------------------------------------


def azure(*events: Any) -> str:
    """Return an answer of scheduledevents."""
    return json.dumps({"DocumentIncarnation": 1, "Events": list(events)})


@pytest.mark.parametrize(
    ("read", "notice"),
    [
        (
            lambda: notices.parse_ec2_notice(json.dumps({"action": "terminate", "time": TIME})),
            ("EC2 will terminate this spot instance", AT),
        ),
        (
            lambda: notices.parse_ec2_notice('{"action": "hibernate"}'),
            ("EC2 will hibernate this spot instance", None),
        ),
        (
            lambda: notices.parse_ec2_notice('{"action": "stop", "time": 7}'),
            ("EC2 will stop this spot instance", None),
        ),
        (lambda: notices.parse_gcp_notice("TRUE"), ("Compute Engine preempts this instance", None)),
        (lambda: notices.parse_gcp_notice("FALSE"), None),
        (
            lambda: notices.parse_azure_notice(azure({**MACHINE, "EventType": "Preempt"}), "vm_3"),
            ("Azure: Preempt of this machine", AT),
        ),
        (
            lambda: notices.parse_azure_notice(
                azure({"EventType": "Terminate", "Resources": ["vm_3"]}), "vm_3"
            ),
            ("Azure: Terminate of this machine", None),
        ),
        (lambda: notices.parse_azure_notice(azure({**MACHINE, "EventType": "Preempt"}), "vm_4"), None),
        (lambda: notices.parse_azure_notice(azure({**MACHINE, "EventType": "Freeze"}), "vm_3"), None),
        (
            lambda: notices.parse_azure_notice(
                azure("Preempt", {"EventType": "Preempt", "Resources": 3}), "vm_3"
            ),
            None,
        ),
        (lambda: notices.parse_azure_notice(azure(), "vm_3"), None),
    ],
)
def test_notice_of_cloud_is_parsed(
    read: Callable[[], PreemptionNotice | None], notice: tuple[str, float | None] | None
) -> None:
    """Events of other machines and other kinds are no notice."""
    assert read() == (None if notice is None else PreemptionNotice(*notice))


@pytest.mark.parametrize(
    "text", ["", "<html>", "[]", "null", '{"action": "dance"}', "{}", "[" * 50000, "\udcff"]
)
def test_answer_that_is_no_notice_is_error(text: str) -> None:
    """Some networks answer each request with a page of a portal."""
    for read in (
        notices.parse_ec2_notice,
        notices.parse_gcp_notice,
        lambda answer: notices.parse_azure_notice(answer, "vm"),
    ):
        with pytest.raises(NoticeQueryError) as raised:
            read(text)
        assert len(str(raised.value)) < 300


OURS = {"EventType": "Preempt", "Resources": ["other", "VM"]}


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([OURS], "Preempt"),
        ([{**OURS, "EventStatus": "Canceled"}, {**OURS, "EventType": "Terminate"}], "Terminate"),
        ([{**OURS, "EventStatus": ["Started"], "NotBefore": {}}], "Preempt"),
        ([{**OURS, "EventStatus": "Completed"}, {**OURS, "EventType": "Reboot"}, 3, None, [OURS]], None),
        ([{**OURS, "Resources": {"vm": 1}}, {**OURS, "Resources": [None, ["vm"]]}, {}], None),
    ],
)
def test_azure_notice_is_first_event_that_ends_this_machine(events: list[Any], reason: str | None) -> None:
    """Events of other machines, of other kinds, and past events are no notice, nor is any other JSON."""
    notice = notices.parse_azure_notice(azure(*events), "vm")
    assert (notice and notice.reason) == (reason and f"Azure: {reason} of this machine")


# ---- the flag ------------------------------------------------------------------------------------------


def test_source_is_cloud_or_file() -> None:
    """A comma may be part of a path."""
    cloud, file = parse_source("notice", "aws "), parse_source("notice", "file:/a,b")
    assert cloud is not None
    assert file is not None
    assert (cloud.name, cloud.poll_interval_s) == ("aws", 5.0)
    assert (file.name, file.poll_interval_s) == ("file:/a,b", 1.0)
    assert parse_source("", "off") is parse_source("", " ") is None


@pytest.mark.parametrize("text", ["awz", "aws:http://a", "file:", "file", "command:x", "off,aws", "aws,gcp"])
def test_invalid_source_is_refused(text: str) -> None:
    """The error names the setting."""
    with pytest.raises(ConfigError, match=r"^preemption-notice is .*: write aws, gcp, azure or file:PATH"):
        parse_source("preemption-notice", text)


# ---- an address that answers ---------------------------------------------------------------------------


@dataclass
class Metadata:
    """Answers of a metadata server by path, and the requests that it got."""

    says: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    base: str = ""


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    """A real HTTP server in this process, with a long time limit."""
    recorder = Metadata()

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            recorder.asked.append((self.command, self.path, dict(self.headers)))
            status, body = recorder.says.get(self.path, (404, b"<html>not found</html>"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(notices, "request_metadata", partial(request_metadata, timeout_s=TIMEOUT_S))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    recorder.base = f"http://127.0.0.1:{server.server_port}"
    yield recorder
    server.shutdown()
    server.server_close()


TOKEN, ACTION = "/latest/api/token", "/latest/meta-data/spot/instance-action"


def test_ec2_source_renews_refused_token(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses no proxy; 404 means no notice."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    source = notices.Ec2Metadata(metadata.base)
    metadata.says[TOKEN] = (200, b"first")
    assert [source.poll(), source.poll()] == [None, None]
    metadata.says[ACTION] = (401, b"")
    metadata.says[TOKEN] = (200, b"second\n")
    with pytest.raises(NoticeQueryError, match="401"):
        source.poll()
    metadata.says[ACTION] = (200, json.dumps({"action": "terminate", "time": TIME}).encode())
    assert source.poll() == PreemptionNotice("EC2 will terminate this spot instance", AT)
    tokens = [
        headers.get("X-aws-ec2-metadata-token") for _, path, headers in metadata.asked if path == ACTION
    ]
    assert tokens == ["first", "first", "first", "second", "second"]
    assert [method for method, path, _ in metadata.asked if path == TOKEN] == ["PUT", "PUT"]
    # The earlier advice to move is no notice, and it is not requested.
    assert {path for _, path, _ in metadata.asked} == {TOKEN, ACTION}


@pytest.mark.parametrize("token", [(403, b"no"), (200, b""), (200, b"two words"), (200, b"x" * 5000)])
def test_ec2_source_without_valid_token_stops(metadata: Metadata, token: tuple[int, bytes]) -> None:
    """The error names the token."""
    metadata.says[TOKEN] = token
    source = notices.Ec2Metadata(metadata.base)
    with pytest.raises(NoticeQueryError, match="token"):
        source.poll()
    assert len(metadata.asked) == 1


def test_gcp_and_azure_sources_send_their_headers(metadata: Metadata) -> None:
    """Azure lists events by the machine's name."""
    azure_source = notices.AzureMetadata(f"{metadata.base}/a")
    gcp = notices.ComputeEngineMetadata(metadata.base)
    metadata.says["/computeMetadata/v1/instance/preempted"] = (200, b"TRUE\n")
    assert gcp.poll() == PreemptionNotice("Compute Engine preempts this instance")
    assert metadata.asked[-1][2]["Metadata-Flavor"] == "Google"
    metadata.says["/a/metadata/instance/compute/name?api-version=2021-02-01&format=text"] = (200, b"vm_3")
    events = azure({**MACHINE, "EventType": "Preempt"}).encode()
    metadata.says["/a/metadata/scheduledevents?api-version=2020-07-01"] = (200, events)
    assert azure_source.poll() == PreemptionNotice("Azure: Preempt of this machine", AT)
    assert metadata.asked[-1][2]["Metadata"] == "true"
    assert len(metadata.asked) == 3
    with pytest.raises(NoticeQueryError, match="404"):
        notices.ComputeEngineMetadata(f"{metadata.base}/other").poll()


@contextlib.contextmanager
def saying(*parts: bytes) -> Iterator[str]:
    """Serve these bytes at an address, and keep the connection open."""
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                for part in parts:
                    peer.sendall(part)
                over.wait(10)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((b"",), "no answer within"),
        ((b"SSH-2.0-OpenSSH\r\n",), "SSH"),
        ((b"\x1b[2Jroot\x07\r\n",), "root"),
        ((HEAD, b"Content-Length: 3\r\n\r\nab"), "no answer within"),
        ((HEAD, b"\r\n", b"x" * (MAX_BYTES + 1)), "more than 65536 bytes"),
        ((HEAD, b"X: " + b"x" * 70000 + b"\r\n"), "header line"),
        ((HEAD, *[b"X: y\r\n"] * 200), "100 headers"),
        ((HEAD, b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"), "IncompleteRead|invalid literal"),
        ((HEAD, b"Content-Length: 99999999999\r\n\r\n", b"x" * (MAX_BYTES + 1)), "more than 65536 bytes"),
        ((HEAD, b"\x00\xff\r\n"), "no answer within"),
    ],
)
def test_request_of_invalid_answer_is_short_printable_error(parts: tuple[bytes, ...], said: str) -> None:
    """The bytes and the time of a request are limited."""
    with saying(*parts) as base, pytest.raises(NoticeQueryError, match=said) as raised:
        request_metadata(base, timeout_s=0.2 if "no answer" in said else TIMEOUT_S)
    assert len(str(raised.value)) < 300
    assert str(raised.value).isprintable()


def test_request_to_closed_port_is_error() -> None:
    """The error has the operating system's reason."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(NoticeQueryError, match="refused"):
            request_metadata(base, timeout_s=TIMEOUT_S)


# ---- files --------------------------------------------------------------------------------


def test_file_source_has_text_of_file_as_reason(tmp_path: Path) -> None:
    """An empty file, a directory and a pipe are notices too, and do not block."""
    path = tmp_path / "notice"
    source = parse_source("notice", f"file:{path}")
    assert source is not None
    assert source.poll() is None
    path.write_bytes(b"  maintenance\x00 \xff\nat noon " + b"x" * 100000)
    notice = source.poll()
    assert notice is not None
    assert notice.reason.startswith("maintenance \ufffd at noon xxx")
    assert len(notice.reason) == MAX_QUOTED_CHARS
    path.unlink()
    makers: list[Callable[[], object]] = [path.touch, path.mkdir, lambda: os.mkfifo(path)]
    for make in makers:
        make()
        assert source.poll() == PreemptionNotice(f"{path} is there")
        path.rmdir() if path.is_dir() else path.unlink()
    path.touch()
    os.utime(path, (0, psutil.boot_time() - 1))
    with pytest.raises(NoticeQueryError, match="older than this machine's start"):
        source.poll()


# ---- the drain ----------------------------------------------------------------------------------------


@dataclass
class DrainRecorder:
    """Events and drains."""

    events: list[dict[str, Any]] = field(default_factory=list)
    drained: threading.Event = field(default_factory=threading.Event)
    causes: list[str] = field(default_factory=list)

    def emit(self, kind: str, **fields: Any) -> None:
        """Record an event."""
        self.events.append({"event": kind, **fields})

    def drain(self, cause: str) -> None:
        """Note a drain."""
        self.causes.append(cause)
        self.drained.set()


def test_watch_logs_failing_source_once_and_drains_once(caplog: pytest.LogCaptureFixture) -> None:
    """A failing source is polled again, and one that had a notice is not."""
    answers = iter(
        [
            NoticeQueryError("refused"),
            ValueError("of ours"),
            None,
            NoticeQueryError("refused"),
            PreemptionNotice("soon", 1e12),
        ]
    )

    def look() -> PreemptionNotice | None:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    caplog.set_level("INFO")
    recorder = DrainRecorder()
    source = NoticeSource("aws", look, 0.01)
    settings = {"preemption_notice": source}
    announcer = Announcer(make_agent_context(emit=recorder.emit, drain=recorder.drain, settings=settings))
    with contextlib.closing(announcer):
        announcer.start(Mock())
        assert recorder.drained.wait(TIMEOUT_S)
    assert recorder.causes == ["a preemption notice"]
    assert [line for line in caplog.messages if "refused" in line] == [
        "preemption-notice aws: refused. It is polled again; further errors are not logged."
    ]
    (event,) = recorder.events
    assert (event["event"], event["reason"], event["deadline"]) == ("preemption-notice", "soon", 1e12)
    assert event["source"] == "aws"
    assert "soon, in " in caplog.messages[-1]
    assert "leaves" in caplog.messages[-1]
