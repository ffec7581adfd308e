"""The scripts of docs/guides/notifications.md, with a web server and a program in the place of sendmail."""

from __future__ import annotations

import email
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer
from typing import Any

import pytest

from elastic_resume.mechanisms.on_event.command import parse_command, run_command
from tests.support.paths import ROOT

SLACK = f"{sys.executable} slack.py"
PAGE = (ROOT / "docs/guides/notifications.md").read_text()
NOTICE = {"run_id": "job", "kind": "failure", "severity": "bad", "text": 'a "quote" and $(touch pwned)\nx'}


class Server(TCPServer):
    """Keeps what it gets."""

    requests: list[tuple[str, Any]]


class Handler(BaseHTTPRequestHandler):
    """Answers each POST with 200, and one to /broken with 500."""

    server: Server

    def do_POST(self) -> None:
        """See base class."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, json.loads(body)))
        self.send_response(500 if self.path == "/broken" else 200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    """Serve on a port of this machine."""
    made = Server(("127.0.0.1", 0), Handler)
    made.requests = []
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Path:
    """Write the page's scripts into a directory, where the commands run."""
    scripts = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
    assert list(scripts) == ["slack.py", "mail.py"]
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLACK_WEBHOOK", f"http://127.0.0.1:{server.server_address[1]}/T0")
    monkeypatch.delenv("http_proxy", raising=False)
    return tmp_path


def send(command: str, **fields: Any) -> str:
    """Run a command with a notice; return its problem."""
    return run_command(parse_command("--on-event", command), {**NOTICE, **fields}, lambda: False)


def test_slack_gets_text(server: Server, directory: Path) -> None:
    """A quote in an error stays one, and no shell reads it."""
    assert not send(SLACK)
    assert server.requests == [("/T0", {"text": f"job: failure: {NOTICE['text']}"})]
    assert not (directory / "pwned").exists()


def test_failure_of_webhook_is_failure_of_command(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged with the end of what it has printed."""
    monkeypatch.setenv("SLACK_WEBHOOK", f"http://127.0.0.1:{server.server_address[1]}/broken")
    problem = send(SLACK)
    assert problem.startswith("ended with exit code 1")
    assert problem.endswith("HTTP Error 500: Internal Server Error")


def test_mail_has_subject_and_text(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body has the whole object too."""
    (directory / "sendmail").write_text('#!/bin/sh\necho "$@" > flags\ncat > mail\n')
    (directory / "sendmail").chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")
    monkeypatch.setenv("MAIL_TO", "ops@example.org")
    assert not send(f"{sys.executable} mail.py")
    mail = email.message_from_bytes((directory / "mail").read_bytes())
    assert (mail["To"], mail["Subject"]) == ("ops@example.org", "[job] failure")
    assert str(mail.get_payload()).startswith(NOTICE["text"])
    assert (directory / "flags").read_text() == "-t -i\n"


def test_webhook_gets_object(server: Server) -> None:
    """The page's own command, at the address of this server."""
    (command,) = re.findall(r'--on-event "(curl [^"]+)"', PAGE)
    assert not send(command.replace("https://example.org", f"http://127.0.0.1:{server.server_address[1]}"))
    assert server.requests == [("/hook", NOTICE)]


def test_only_bad_notices_are_passed_on(server: Server, directory: Path) -> None:
    """With the page's line for it; the command ends well all the same."""
    (line,) = re.findall(r"`(if notice\[[^`]+)`", PAGE)
    script = directory / "slack.py"
    script.write_text(re.sub(r"(notice = .*\n)", rf"\1{line}\n", script.read_text()))
    assert not send(SLACK, severity="note")
    assert not server.requests
    assert not send(SLACK)
    assert len(server.requests) == 1
