"""The launcher shim's JSON, the messages that a supervisor reads, and the names of parked workers."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.agent.workers import launcher_shim, supervisor, worker_request


@given(
    st.dictionaries(
        st.text(),
        st.integers() | st.text() | st.lists(st.text()) | st.dictionaries(st.text(), st.lists(st.integers())),
    )
)
def test_requests_are_json(value: dict[str, object]) -> None:
    """Whatever text a request contains."""
    assert json.loads(launcher_shim.encode_json(value)) == value


def test_supervisor_ignores_messages_that_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the supervisor would end the worker."""
    monkeypatch.setenv(worker_request.ENV_PARKED, "test")
    link = supervisor.WorkerLink()
    assert link.socket is not None
    assert link._worker_end is not None
    with closing(link.socket), closing(link._worker_end) as worker_end:
        worker_end.sendall(b"waiting \nwaiting soon\nwaiting nan\nwaiting -1\n\xff\n\n")
        assert link.receive()
        assert (link.watch_until, link.is_parked) == (0.0, False)
        worker_end.sendall(b"waiting 2.5\nparked\n")
        assert link.receive()
        assert link.watch_until > 0
        assert link.is_parked


def test_taken_names_do_not_keep_workers_from_parking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user reads a parked worker's name in /proc/net/unix, and takes all names like it."""
    (tmp_path / "parked").touch()
    monkeypatch.setenv(worker_request.ENV_PARKED, str(tmp_path / "parked"))
    assert not worker_request.is_parked("1")
    first, other_rank = worker_request.listen_parked("1"), worker_request.listen_parked("0")
    assert first is not None
    assert other_rank is not None
    with closing(other_rank), closing(first):
        assert worker_request.is_parked("1")
        taken = worker_request.read_parked_address("1")
    assert not worker_request.is_parked("1")
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(taken)
        squatter.listen()
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        assert not worker_request.is_parked("1")
        monkeypatch.undo()
        monkeypatch.setenv(worker_request.ENV_PARKED, str(tmp_path / "parked"))
        again = worker_request.listen_parked("1")
        assert again is not None
        with closing(again):
            assert worker_request.read_parked_address("1") != taken
            assert worker_request.is_parked("1")
