"""A process that stays when the world changes leaks nothing, and compiles its model once.

The test is agent and supervisor of two workers: it requests parking, and begins their next generation.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic_resume import constants
from elastic_resume.slots.ipc import SnapshotServer
from tests.integration.test_torn_slots import server  # noqa: F401
from tests.support import launch_ranks
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

CHANGES = int(os.environ.get("ELASTIC_RESUME_WORLD_CHANGES", "30"))
FIRST = 10  # caches are full


class Worker:
    """A worker, whose supervisor is the test."""

    def __init__(self, listener: socket.socket, output: Path) -> None:
        """Accept its connections."""
        self._output = output
        self._link, self._report = (listener.accept()[0] for _ in range(2))
        self._words, self._lines = self._link.makefile("rb"), self._report.makefile("rb")

    def read_report(self, kind: str) -> Any:
        """Return the next report of the worker, which must be of this kind."""
        (found,) = json.loads(self._lines.readline() or '{"ended": 0}').items()
        assert found[0] == kind, self._output.read_text()
        return found[1]

    def start_parking(self) -> None:
        """Request parking."""
        self._link.sendall(b"park\n")

    def resume(self, environ: Mapping[str, str]) -> None:
        """Begin the next generation when it has parked."""
        while (word := self._words.readline()) != b"parked\n":
            assert word in {b"restartable\n", b"waiting\n"}
        text = json.dumps(dict(environ)).encode()
        with self._output.open("ab") as file:
            socket.send_fds(self._link, [b"resume %d\n%b" % (len(text), text)], [file.fileno()] * 3)

    def close(self) -> None:
        """Close the connections."""
        for each in (self._words, self._lines, self._link, self._report):
            each.close()


class World:
    """Two workers of one node, in one generation after the other."""

    def __init__(self, server: SnapshotServer, directory: Path, *words: str) -> None:
        self._server = server
        self._directory = directory
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[Any] = []
        self.workers: list[Worker] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "socket"))
            listener.listen(4)
            listener.settimeout(60)
            for rank in range(2):
                script = [str(SCRIPTS / "survivor.py"), str(directory / "socket"), *words]
                output = directory / f"rank{rank}"
                self._processes.append(launch_ranks.start_rank(output, self._environ(rank, 1), script))
                self.workers.append(Worker(listener, output.with_suffix(".err")))

    def change(self, generation: int) -> None:
        """Let all workers leave their generation and begin the next one."""
        for worker in self.workers:
            worker.start_parking()
        for rank, worker in enumerate(self.workers):
            worker.resume(self._environ(rank, generation))

    def _environ(self, rank: int, generation: int) -> dict[str, str]:
        return launch_ranks.rank_environment(
            rank,
            2,
            self._store.port,
            **{
                "LOCAL_RANK": str(rank),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(generation),
                constants.ENV_GENERATION: str(generation),
                constants.ENV_AGENT_PID: str(os.getpid()),
                constants.ENV_COMMITTER: self._server.socket_name,
                constants.ENV_CKPT_DIR: str(self._directory),
                constants.ENV_RUN_ID: "job",
                constants.ENV_NODE_NAME: "n0",
            },
        )

    def close(self) -> None:
        """Kill the workers."""
        for process in self._processes:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                print("ended with", process.wait(10))  # pytest shows it if the test fails
        for worker in self.workers:
            worker.close()


def measure_calls(world: World, changes: int) -> Iterator[list[Any]]:
    """Change the world; yield what each worker holds at the beginning of each call."""
    for generation in range(2, changes + 3):
        yield [worker.read_report("call") for worker in world.workers]
        for worker in world.workers:
            worker.read_report("step")
        if generation < changes + 2:
            world.change(generation)


@pytest.mark.parametrize("compiles", ["above"])
def test_world_changes_leak_nothing(compiles: str, server: SnapshotServer, tmp_path: Path) -> None:  # noqa: F811
    """What a process holds after many changes is what it held after ten."""
    with contextlib.closing(World(server, tmp_path, compiles)) as world:
        calls = list(measure_calls(world, CHANGES))
    for before, after in zip(calls[FIRST], calls[-1], strict=True):
        for name in before:
            print(name, before[name] if name!="objects" else 0, after[name] if name!="objects" else {k:v-before[name].get(k,0) for k,v in after[name].items() if v!=before[name].get(k,0)})
    print([c[0]["memory"] for c in calls], [c[0]["compiled"] for c in calls][::10])
    assert 0
