"""A process that stays when the world changes leaks nothing, and compiles its model once.

The test is agent and supervisor of two workers: it requests parking, and begins their next generation.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastic_resume import constants
from elastic_resume.slots.ipc import SnapshotServer
from tests.integration import test_torn_slots
from tests.support import launch_ranks
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster
server = test_torn_slots.server

CHANGES = int(os.environ.get("ELASTIC_RESUME_WORLD_CHANGES", "30"))
FIRST = 10  # then caches are full
LAST = 5
# Private memory has grown by 7 to 15 MB in 200 changes, nearly all of it in the first hundred: a run of 200
# may fail here. Gradient buckets that leak would add 1 MB in each change.
MAX_GROWTH_BYTES = 12 << 20


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

    def wait_until_parked(self) -> None:
        """Wait for the worker's message."""
        while (word := self._words.readline()) != b"parked\n":
            assert word.split()[0] in {b"restartable", b"waiting"}, self._output.read_text()

    def resume(self, environ: Mapping[str, str]) -> None:
        """Begin the next generation."""
        text = json.dumps(dict(environ)).encode()
        with self._output.open("ab") as file:
            socket.send_fds(self._link, [b"resume %d\n%b" % (len(text), text)], [file.fileno()] * 3)

    def close(self) -> None:
        """Close the connections."""
        for each in (self._words, self._lines, self._link, self._report):
            each.close()


def start_store() -> TCPStore:
    """Start the store of a generation, as the agent does."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class World:
    """Two workers of one node, in one generation after the other."""

    def __init__(self, server: SnapshotServer, directory: Path, kind: str) -> None:
        """``kind``: "ddp" or "sharded"."""
        self._server = server
        # FSDP frees whole parameters in every step, and glibc would keep more of their holes in each world.
        self._memory = {"MALLOC_MMAP_THRESHOLD_": "1000000"} if kind == "sharded" else {}
        self._directory = directory
        self._store = start_store()
        self._processes: list[Any] = []
        self.workers: list[Worker] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "socket"))
            listener.listen(4)
            listener.settimeout(60)
            for rank in range(2):
                script = [str(SCRIPTS / "survivor.py"), str(directory / "socket"), kind]
                output = directory / f"rank{rank}"
                self._processes.append(launch_ranks.start_rank(output, self._environ(rank, 1), script))
                self.workers.append(Worker(listener, output.with_suffix(".err")))

    def change(self, generation: int) -> None:
        """Let all workers leave their generation and begin the next one."""
        for worker in self.workers:
            worker.start_parking()
        for worker in self.workers:
            worker.wait_until_parked()
        self._store = start_store()
        for rank, worker in enumerate(self.workers):
            worker.resume(self._environ(rank, generation))

    def _environ(self, rank: int, generation: int) -> dict[str, str]:
        return launch_ranks.rank_environment(
            rank,
            2,
            self._store.port,
            **{
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(generation),
                constants.ENV_GENERATION: str(generation),
                constants.ENV_AGENT_PID: str(os.getpid()),
                constants.ENV_COMMITTER: self._server.socket_name,
                constants.ENV_CKPT_DIR: str(self._directory),
                constants.ENV_RUN_ID: "job",
                constants.ENV_NODE_NAME: "n0",
                **self._memory,
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


def list_growth(calls: Sequence[dict[str, Any]], name: str) -> dict[str, int]:
    """Return what one process holds more of in each of its last generations than ever in its first ten.

    One generation alone may begin while a thread of the one before still ends.
    """
    most, least = Counter[str](), Counter(calls[-1][name])
    for call in calls[:FIRST]:
        most |= Counter(call[name])
    for call in calls[-LAST:]:
        least &= Counter(call[name])
    return dict(least - most)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ddp", pytest.param("sharded", marks=pytest.mark.soak)])
def test_world_changes_leak_nothing(server: SnapshotServer, tmp_path: Path, kind: str) -> None:
    """What a process holds after many changes is what it held in ten, and its model was compiled once."""
    with contextlib.closing(World(server, tmp_path, kind)) as world:
        for calls in zip(*measure_calls(world, CHANGES), strict=True):
            last = calls[-1]
            for name in ("descriptors", "counts"):
                assert list_growth(calls, name) == {}
            objects = list_growth(calls, "objects")
            assert {kind: count for kind, count in objects.items() if count > (CHANGES - FIRST) // 2} == {}
            assert last["signals"] == calls[1]["signals"]
            assert last["compiled"] == calls[1]["compiled"]
            assert last["memory"] - max(call["memory"] for call in calls[:FIRST]) < MAX_GROWTH_BYTES
