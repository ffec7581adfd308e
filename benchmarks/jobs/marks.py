"""Read the marks that the workers of `steps.py` record, as their files grow."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Worker:
    """One worker process, in one world if it outlives several. ``marks`` are the times of its marks."""

    pid: int
    node: str
    rank: int
    world_size: int
    marks: dict[str, float]
    world: str = ""  # the same on all ranks of one world; empty before they have met
    start_step: int = 0  # what it resumed from
    last_step: int = 0
    steps: list[float] = field(default_factory=list)  # when it finished each

    def add(self, line: dict[str, Any]) -> None:
        """Record one mark."""
        self.marks.setdefault(line["mark"], line["t"])
        if line["mark"] == "resumed":
            self.world, self.start_step = line["world"], line["step"]
        elif line["mark"] == "step":
            self.last_step = line["step"]
            self.steps.append(line["t"])


class Marks:
    """All workers of a job so far, read as their files grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, int] = {}  # bytes read of each file
        self._workers: dict[str, Worker] = {}

    def look(self) -> None:
        """Read new marks."""
        for path in self._directory.glob("*"):
            name, start = path.name, self._read.get(path.name, 0)
            if path.stat().st_size == start:
                continue
            with open(path, "rb") as file:
                file.seek(start)
                whole = file.read().rpartition(b"\n")[0]
            for line in map(json.loads, whole.splitlines()):
                if line["mark"] == "born":
                    known = {key: line[key] for key in ("pid", "node", "rank", "world_size")}
                    self._workers[name] = Worker(**known, marks={})
                self._workers[name].add(line)
            self._read[name] = start + len(whole) + bool(whole)

    def workers(self) -> list[Worker]:
        """List all workers that have started, dead ones too."""
        return list(self._workers.values())

    def world(self, after: float, steps: int = 1) -> list[Worker]:
        """Return the newest world since ``after`` in which every rank has finished ``steps`` steps, or [].

        A worker may have been born long before its world, if it starts ahead.
        """
        worlds: dict[str, list[Worker]] = {}
        for worker in self._workers.values():
            if worker.world and worker.marks["resumed"] > after:
                worlds.setdefault(worker.world, []).append(worker)
        whole = [
            world
            for world in worlds.values()
            if len(world) == world[0].world_size and all(len(worker.steps) >= steps for worker in world)
        ]
        return max(whole, key=lambda world: world[0].marks["resumed"], default=[])
