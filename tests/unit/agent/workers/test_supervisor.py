"""Test what the worker supervisor does between fork and start of its worker, in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# The supervisor ends at once, or when its worker runs, or after it. The output ends when both have ended.
CODE = """
import _socket, json, os, signal, sys, time
from elastic_resume.agent.workers import supervisor
fork, death = os.fork, sys.argv[1]
def fork_late():
    parent, pid = os.getpid(), fork()
    if pid and death == "before":
        os._exit(0)
    while not pid and death == "before" and os.getppid() == parent:
        time.sleep(0.001)
    return pid
if fork() == 0:
    os.fork, (shim, connection) = fork_late, _socket.socketpair()
    numbers = set(os.listdir("/proc/self/fd")) - {str(connection.fileno())}
    supervisor.fork_supervised_worker(connection, set())
    leaders = [os.getsid(pid) == pid for pid in (os.getpid(), os.getppid())]
    listed = set(os.listdir("/proc/self/fd")) - numbers
    inherited = [number for number in listed if os.path.exists("/proc/self/fd/" + number)]
    os.write(1, json.dumps([leaders, inherited]).encode())
    if death == "while it runs":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.5)  # nothing to wait for, should the worker live
        os.write(1, b"alive")
    os._exit(0)
"""


@pytest.mark.parametrize("death", ["before", "while it runs", "after"])
def test_worker_ends_with_its_supervisor_and_inherits_nothing_of_it(death: str) -> None:
    """The kernel sends the signal of a parent's death only to a worker that has asked for it before."""
    output = subprocess.run([sys.executable, "-c", CODE, death], capture_output=True, check=True).stdout
    if death == "before":
        assert output == b""
    else:
        assert json.loads(output) == [[True, True], []]
