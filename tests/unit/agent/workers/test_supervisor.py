"""Test what the worker supervisor does between fork and start of its worker, in processes of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("dies", "output"), [(False, b"started"), (True, b"")])
def test_worker_whose_supervisor_died_before_its_start_runs_nothing(dies: bool, output: bytes) -> None:
    """The kernel sends a worker the signal of its parent's death only after the worker has asked for it."""
    code = f"""
import _socket, os, sys, time
from elastic_resume.agent.workers import supervisor
fork = os.fork
def fork_late():
    parent, pid = os.getpid(), fork()
    if pid and {dies}:
        os._exit(0)
    while {dies} and not pid and os.getppid() == parent:
        time.sleep(0.001)
    return pid
if fork() == 0:  # a supervisor leads a session
    os.fork = fork_late
    shim, connection = _socket.socketpair()
    supervisor.fork_supervised_worker(connection, set())
    os.write(1, b"started")
    os._exit(0)
"""
    # The output ends when worker and supervisor have ended.
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == output
