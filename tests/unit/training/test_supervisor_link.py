"""Test how a parked worker ends that its supervisor cannot end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_resume import constants
from elastic_resume.training.supervisor_link import SupervisorLink

# The supervisor stops, as SIGSTOP stops it, and the agent's file goes while the worker is parked.
SUPERVISOR = """
import os, signal, socket, sys
from elastic_resume import constants
from elastic_resume.training import supervisor_link

os.environ[constants.ENV_PARKED] = sys.argv[1]
end, workers_end = socket.socketpair()
if os.fork():
    os.kill(os.getpid(), signal.SIGSTOP)
end.close()
supervisor_link.AGENT_POLL_INTERVAL_S = 0.01
link = supervisor_link.SupervisorLink(workers_end)
os.unlink(sys.argv[1])
link.park()
"""


def test_parked_worker_ends_with_its_stopped_supervisor_when_the_agent_has_ended(tmp_path: Path) -> None:
    """Nobody else knows that supervisor: its launcher shim has exited."""
    path = tmp_path / "parked"
    path.touch()
    command = [sys.executable, "-c", SUPERVISOR, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as supervisor:
        try:
            assert supervisor.wait(20) == -signal.SIGKILL
            assert supervisor.stdout is not None
            assert supervisor.stdout.read() == b""  # the worker has ended too
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(supervisor.pid, signal.SIGKILL)


def test_without_the_agents_file_no_agent_counts_as_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that has moved to another directory must not kill its supervisor."""
    monkeypatch.delenv(constants.ENV_PARKED, raising=False)
    end, workers_end = socket.socketpair()
    with end, workers_end:
        link = SupervisorLink(workers_end)
        monkeypatch.chdir(tmp_path)
        assert not link._has_agent_ended()
