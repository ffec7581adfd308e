"""The machines of a simulated job: who trains, who stands by, who is away and until when; and what they hold.

Nodes that train hold the same copies, so what is kept is one line for all of them, and one for each that is
different. No time passes here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable

from elastic_resume.faults.simulate_job import Pace
from elastic_resume.policy.source import DISK, MEMORY, Copy, Inventory

Held = tuple[int, int]  # generation and step of a copy


class Machines:
    """Numbers from 0 on. ``world``: who trains; ``idle``: who is up beside it."""

    def __init__(self, count: int) -> None:
        self.world: set[int] = set()
        self.idle = set(range(count))
        self.silent: set[int] = set()  # of the last world: gone, which nobody can know before they come back
        self._away: dict[int, float] = {}
        self._returns: list[tuple[float, int]] = []

    @property
    def up(self) -> int:
        """How many are up."""
        return len(self.world) + len(self.idle)

    @property
    def next_return_s(self) -> float:
        """When the next one comes back."""
        while self._returns and self._away.get(self._returns[0][1]) != self._returns[0][0]:
            heapq.heappop(self._returns)  # it was hit again on its way
        return self._returns[0][0] if self._returns else math.inf

    def come_back(self) -> None:
        """Let the next one come back."""
        _, node = heapq.heappop(self._returns)
        del self._away[node]
        self.silent.discard(node)
        self.idle.add(node)

    def go(self, node: int, back_s: float, *, silently: bool) -> None:
        """Let one go; one that is on its way back begins anew."""
        if node in self.world:
            self.world.discard(node)
            if silently:
                self.silent.add(node)
        self.idle.discard(node)
        self._away[node] = back_s
        heapq.heappush(self._returns, (back_s, node))

    def may_form(self, least: int) -> bool:
        """Whether there are ``least``, and a quorum: most of those not known gone, or the lower half."""
        if self.up < least:
            return False
        members, silent = len(self.world), len(self.silent)
        return members > silent or not silent or (members == silent and min(self.world) < min(self.silent))

    def form(self, most: int) -> list[int]:
        """Form a world of those that are up; give the newcomers, which come in order of their names."""
        new = heapq.nsmallest(most - len(self.world), self.idle)
        self.idle.difference_update(new)
        self.world.update(new)
        self.silent.clear()
        return new


class Copies:
    """Which step who holds, and where. All that train hold the same, but for those that are named."""

    def __init__(self, count: int, *, slots: int, commit_s: float, copy_s: float) -> None:
        """``slots``: of memory; without any, copies are on disks only."""
        self._slots, self._commit_s, self._copy_s = slots, commit_s, copy_s
        self._memory: Held | None = None
        self._older: Held | None = None  # in the memory of
        self._torn: set[int] = set()  # nodes whose worker died while it made the newest copy
        self._disk: Held | None = None
        self._coming: tuple[float, Held] | None = (
            None  # what agents commit at a generation's end, and until when
        )
        self._own: dict[int, Held | None] = dict.fromkeys(range(count))  # disks of those that do not train
        self._pace: tuple[Pace, int, float] | None = None

    def train(self, pace: Pace, generation: int, began_s: float) -> None:
        """A generation begins to train."""
        self._pace = (pace, generation, began_s)

    def stop(self, now_s: float, steps: int, *, torn: Collection[int], left: int, drained: bool) -> None:
        """It has ended after so many steps.

        ``torn``: whose worker failed, of ``left`` nodes; ``drained``: all have copied the last step.
        """
        if self._pace is None:
            return
        self.disk(now_s)
        pace, generation, began_s = self._pace
        self._pace = None
        newest = steps if drained else pace.newest_snapshot(steps)
        if newest and self._slots:
            if now_s - began_s - pace.time_of(newest) < self._copy_s and not drained:
                before = pace.newest_snapshot(newest - 1)
                self._torn = set(torn)
                self._older = (generation, pace.start + before) if before else self._memory
            self._memory = (generation, pace.start + newest)
            if len(self._torn) == left:  # nobody else has it
                self._memory = self._older
                self._torn.clear()
            self._coming = (now_s + self._commit_s, self._memory) if self._memory else None
        elif drained and newest:
            self._disk = (generation, pace.start + newest)

    def disk(self, now_s: float) -> Held | None:
        """What the disks of those that train hold by now."""
        if self._coming and self._coming[0] <= now_s:
            self._disk, self._coming = self._coming[1], None
        if self._pace is not None:
            pace, generation, began_s = self._pace
            newest = pace.newest_commit(now_s - began_s)
            if newest:
                self._disk = (generation, pace.start + newest)
        return self._disk

    def leave(self, node: int, now_s: float, *, wiped: bool) -> None:
        """A node goes; it keeps its disk, unless that is wiped."""
        self._torn.discard(node)
        if wiped:
            self._own[node] = None
        else:
            self._own.setdefault(node, self.disk(now_s))

    def forget(self) -> None:
        """Nobody that trained is left: what there is lies on the disks of those that come back."""
        self._memory = self._older = self._disk = self._coming = None

    def loaded(self, held: Held | None, world: set[int]) -> None:
        """All that train have loaded this copy; those that lacked it have it on their disks soon."""
        self._memory = held if self._slots else None
        self._torn.clear()
        self._disk = self._disk or held
        for node in self._own.keys() & world:
            del self._own[node]

    def inventories(self, world: set[int], reached: Held, now_s: float) -> list[Inventory]:
        """What the nodes of a world list before they load; of those that hold the same as many as matter."""
        strangers = self._own.keys() & world
        others = self._torn | strangers
        # No more send than there are to receive, so more of those that hold the same would change nothing.
        alike = itertools.islice((node for node in world if node not in others), 1 + len(others))
        disk = self.disk(now_s)
        found: list[tuple[Iterable[int], Held | None, Held | None]] = [
            (alike, self._memory, disk),
            (sorted(self._torn), self._older, disk),
        ]
        by_disk: dict[Held | None, list[int]] = {}
        for node in sorted(strangers):
            by_disk.setdefault(self._own[node], []).append(node)
        found += [(nodes, None, held) for held, nodes in by_disk.items()]
        if not any(memory or disk for _, memory, disk in found):
            return [_inventory(min(world), None, None, reached)]  # a cold start, whoever else holds nothing
        return [_inventory(node, memory, disk, reached) for nodes, memory, disk in found for node in nodes]


def _inventory(node: int, memory: Held | None, disk: Held | None, reached: Held) -> Inventory:
    name = f"n{node}"
    held = ((MEMORY, memory), (DISK, disk))
    return Inventory(
        name,
        node,
        tuple(Copy(name, *copy, writer_rank=node, tier=tier) for tier, copy in held if copy),
        generation=reached[0],
        last_generation=reached[0],
        last_step=reached[1],
    )
