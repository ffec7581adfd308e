"""Real agents of ``elastic-resume run`` in one directory, started and stopped by a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume import events
from elastic_resume.agent.workers.forkserver_manager import ForkedProcess
from elastic_resume.testing import fork_server
from tests.support.processes import wait_for

Agent = subprocess.Popen[bytes] | ForkedProcess
RUN = [sys.executable, "-m", "elastic_resume", "run"]


class Agents:
    """Agents in one directory; each writes its output into a file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[Agent] = []
        self.port = 0  # of the rendezvous of two
        self.command = RUN  # what starts an agent

    def script(self, text: str, name: str = "train.py") -> str:
        """Write a training script."""
        (self.directory / name).write_text(text)
        return name

    def start(self, *words: str, node: str = "a", warm: bool = False, **environ: str) -> Agent:
        """Start one agent; cold by default, because most scripts here do not import torch."""
        command = [*self.command, *words]
        ours = {"ELASTIC_RESUME_NODE_NAME": node, "ELASTIC_RESUME_NO_WARM": "0" if warm else "1"}
        env = {**os.environ, **ours, **environ}
        with open(self.directory / f"{node}.log", "ab") as output:
            is_python = command[0] == sys.executable
            forked = fork_server.start(command, env, output, cwd=self.directory) if is_python else None
            process = forked or subprocess.Popen(
                command, cwd=self.directory, stdout=output, stderr=subprocess.STDOUT, env=env
            )
        self.started.append(process)
        return process

    def run(self, *words: str, **environ: str) -> tuple[int, str]:
        """Run one agent to its end; return exit code and output."""
        code = self.start(*words, warm=False, **environ).wait(120)
        return code, self.log()

    def log(self, node: str = "a") -> str:
        """Return what an agent and its workers have printed."""
        return (self.directory / f"{node}.log").read_text()

    def wait_for_workers(self, node: str = "a") -> None:
        """Wait until the agent, which logs DEBUG, has started its workers and would pass a signal on."""
        wait_for(lambda: "all workers of this node have started" in self.log(node), "the workers' start")

    def events(self, kind: str, node: str = "a", run_id: str = "train") -> list[events.Event]:
        """Return one node's events of a kind."""
        path = self.directory / "checkpoints" / run_id / node / "events.jsonl"
        return [event for event in events.read(path) if event["event"] == kind]

    def pids(self, prefix: str) -> list[int]:
        """Return the ids of the processes that left a file ``PREFIX-PID``."""
        return [int(path.name.rpartition("-")[2]) for path in self.directory.glob(f"{prefix}-*")]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """A directory for agents; none outlives the test."""
    found = Agents(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.wait()
