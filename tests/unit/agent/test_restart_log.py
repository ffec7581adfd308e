"""Test lines about restarts that need no generation."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from elastic_resume.agent.failure_evidence import FailureEvents
from elastic_resume.agent.restart_log import RestartLog
from elastic_resume.machine import ProcessLimit


def test_refused_processes_are_logged_once_for_each_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The errors of Python and torch do not name the limit. Earlier refusals belong to another job."""
    (tmp_path / "pids.current").write_text("9\n")
    (tmp_path / "pids.max").write_text("64\n")
    (tmp_path / "pids.events").write_text("max 5\n")
    monkeypatch.setattr(ProcessLimit, "find_own", lambda: ProcessLimit(tmp_path, tmp_path))
    with contextlib.closing(FailureEvents()) as evidence:
        log = RestartLog("a", evidence)
    log.log_refused_processes()
    assert not caplog.messages
    (tmp_path / "pids.events").write_text("max 7\n")
    for _ in range(2):
        log.log_refused_processes()
    (message,) = caplog.messages
    assert message.startswith(
        "the kernel refused 2 new processes or threads, because the control group may have 64 (pids.max): "
    )
