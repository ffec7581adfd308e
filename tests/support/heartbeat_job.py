"""A job of workers that only write heartbeats, and checks of which worker ran when."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil

from elastic_resume.testing import Cluster
from tests.support.paths import SCRIPTS

SCRIPT = SCRIPTS / "heart.py"


@dataclass(frozen=True)
class WorkerLifetime:
    """One worker; its first and last heartbeat are CLOCK_MONOTONIC seconds."""

    generation: int
    node: str
    rank: int
    world_size: int
    first_heartbeat: float
    last_heartbeat: float


class HeartbeatJob:
    """The heartbeat job of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.directory = cluster.directory / "hearts"
        self.directory.mkdir(exist_ok=True)

    def start(self, only: list[int] | None = None) -> None:
        """Start the job on all nodes, or on some."""
        self.cluster.start(SCRIPT, str(self.directory), only=only)

    def stop(self) -> None:
        """Let every worker exit with 0."""
        (self.directory / "stop").touch()

    def worker_lifetimes(self) -> list[WorkerLifetime]:
        """Return all workers that wrote a heartbeat, by generation and rank."""
        found = []
        for path in sorted(self.directory.glob("*.beats")):
            generation, node, rank, world_size = path.stem.split("-")
            beats = [float(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
            if beats:
                life = WorkerLifetime(int(generation), node, int(rank), int(world_size), beats[0], beats[-1])
                found.append(life)
        return sorted(found, key=lambda life: (life.generation, life.rank))

    def nodes_in_generation(self, generation: int) -> list[str]:
        """Return the nodes of a generation that wrote heartbeats, in rank order."""
        return [life.node for life in self.worker_lifetimes() if life.generation == generation]

    def newest_generation(self) -> int:
        """Return the newest generation with a heartbeat; 0 before the first."""
        return max((life.generation for life in self.worker_lifetimes()), default=0)

    def wait_for_world(self, nodes: list[int], after: int = 0, timeout_s: float = 60.0) -> int:
        """Wait until a generation after `after` runs on exactly these nodes; return it."""
        names = {f"n{index}" for index in nodes}

        def look() -> int | None:
            newest = self.newest_generation()
            lives = [life for life in self.worker_lifetimes() if life.generation == newest]
            whole = {life.node for life in lives} == names and {life.world_size for life in lives} == {
                len(names)
            }
            return newest if newest > after and whole else None

        return self.cluster.wait(look, f"a world of {sorted(names)} after {after}", timeout_s)

    def wait_for_rendezvous_event(self, index: int, kind: str) -> None:
        """Wait until a node's rendezvous has emitted an event of this kind."""
        self.cluster.wait(
            lambda: [
                event for event in self.cluster.node_events(index, "rendezvous") if event["what"] == kind
            ],
            f"n{index} to tell of {kind}",
        )

    def wait_for_output(self, index: int, text: str) -> None:
        """Wait until a node has printed ``text``."""
        self.cluster.wait(lambda: text in self.cluster.output(index), f"n{index} to say {text!r}")

    def wait_idle(self, index: int) -> None:
        """Wait until no worker runs on a node."""
        self.cluster.wait(lambda: not self._workers(index), f"n{index} to be idle")

    def worker(self, index: int) -> psutil.Process:
        """Return the worker that runs on a node."""
        found = self._workers(index)
        assert found, f"no worker runs on n{index}"
        return found[0]

    def _workers(self, index: int) -> list[psutil.Process]:
        found = []
        for process in self.cluster.processes(index):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                # The command lines of agent and launcher shim name the script too.
                is_cold = SCRIPT.as_posix() in words and words[1] == "-u"
                if process.name() == "er-worker" or is_cold:
                    found.append(process)
        return found

    def check_survivors_keep_first_ranks(self) -> None:
        """Check that members of the preceding generation have the first ranks, in their order.

        A member is the process of an agent: a node whose agent was started again is a newcomer. A generation
        is skipped if not every node has emitted its `round` event.
        """
        worlds: dict[int, list[tuple[str, int]]] = {}
        absent = ("", 0)
        for event in self.cluster.events("generation-start"):
            members = worlds.setdefault(event["generation"], [absent] * event["num_nodes"])
            members[event["node_rank"]] = event["node"], event["pid"]
        for generation, world in worlds.items():
            before = worlds.get(generation - 1, [absent])
            if absent not in (*before, *world):
                stayed = [member for member in before if member in world]
                assert world[: len(stayed)] == stayed, f"generation {generation} of {worlds}"

    def check_no_minority_world(self, after: int, *sides: set[str]) -> None:
        """Check that no generation after `after` ran on one of these sides alone."""
        for generation in {life.generation for life in self.worker_lifetimes() if life.generation > after}:
            world = set(self.nodes_in_generation(generation))
            assert not any(world <= side for side in sides), f"generation {generation}: {world}"

    def check_generations_do_not_overlap(self) -> None:
        """Check that no worker writes a heartbeat after one of a later generation has begun."""
        lives = self.worker_lifetimes()
        ranks = [(life.generation, life.rank) for life in lives]
        assert len(set(ranks)) == len(ranks), f"a rank stands twice: {lives}"
        sizes = {life.generation: life.world_size for life in lives}
        assert all(sizes[life.generation] == life.world_size for life in lives), f"two sizes: {lives}"
        for life in lives:
            for other in lives:
                if other.generation > life.generation:
                    assert life.last_heartbeat < other.first_heartbeat, (
                        f"{life} still beat when {other} began"
                    )
