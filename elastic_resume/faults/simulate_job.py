"""What `simulate.py` plays: a job, what its parts cost, and how far a generation of it gets in a given time.

Pure. When copies are made is asked of `policy/cadence.py`, with the numbers that a node's lead would give it.
Defaults are figures of ARCHITECTURE.md where we have measured them, and else said to be assumptions by
``elastic-resume plan``.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elastic_resume.policy import cadence, health, restart
from elastic_resume.policy.cadence import AUTO, Every, SaveCost
from elastic_resume.policy.source import DISK, ResumePlan, streams

COPY_BYTES_PER_S = 11.5e9  # of one thread; a GPU's copies go at the speed of its bus
LOAD_BYTES_PER_S = 3.4e9  # of a resume from memory
LINK_SHARE = 0.5  # of a link's speed that a transfer reaches (0.58 and 0.37 of 10 Gbit/s)
DISK_READ_SHARE = 0.73  # of a disk's speed that a resume reaches (0.76 and 0.70)
WARM_SNAPSHOTS = 4  # a generation takes as many at once before it knows what they cost: saver.WARM_UP + 1
FORM_S = 0.2  # from the failure being known to the next world
NODE_TIMEOUT_S = 3.0  # --node-timeout
DEBOUNCE_S = 1.0  # after which a newcomer causes a restart
SETTLE_S = 3.0  # --settle, of a first start
JOINED, DRAINED = "joined", "drained"  # a node has come; all have copied their last step, to let it in
_BEYOND = 1 << 50


@dataclass(frozen=True)
class Job:
    """A job, and what its parts cost in seconds.

    ``step_by_nodes`` are measured lengths of a step, by the number of nodes; for others a step does the same
    work on those that are there. ``slots``: of memory for snapshots, as `policy/budget.py` counts.
    ``snapshot_s``: what one adds to training. ``start_s``: of a restart, from the next world to its first
    step, without the state's way. ``cold_s``: of a first start, more. ``noticed_s``: from a failure to its
    being known, by kind. ``away_s``: how long nodes are away, by what has befallen them (`rates.Kind.away`).
    """

    nodes: int
    min_nodes: int
    state_bytes: int
    spares: int = 0
    step_s: float = 1.0
    step_by_nodes: Mapping[int, float] = field(default_factory=dict)
    snapshot_every: Every = AUTO
    save_every: Every = AUTO
    slots: int = 3
    snapshot_s: float = 0.0
    copy_bytes_per_s: float = COPY_BYTES_PER_S
    disk_bytes_per_s: float = 2e9
    link_bytes_per_s: float = 25e9 / 8
    start_s: float = 30.0
    cold_s: float = 30.0
    max_no_progress: int = restart.MAX_NO_PROGRESS
    noticed_s: Mapping[str, float] = field(default_factory=dict)
    away_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def commit_s(self) -> float:
        """Seconds from the first byte of a checkpoint to its commit."""
        return self.state_bytes / self.disk_bytes_per_s

    @property
    def copy_s(self) -> float:
        """Seconds until a snapshot is whole."""
        return self.state_bytes / self.copy_bytes_per_s

    def step_on(self, nodes: int) -> float:
        """Seconds of a step on so many nodes: the global batch stays, so fewer of them take longer."""
        known = self.step_by_nodes.get(nodes)
        return self.step_s * self.nodes / nodes if known is None else known

    def noticed_after_s(self, kind: str) -> float:
        """Seconds from a failure to its being known."""
        given = self.noticed_s.get(kind)
        if given is not None:
            return given
        if kind == "hang":
            return health.Patience().limit_s(self.step_s, between_epochs=False)
        # A process that ends is seen at once; its connections end with it. A machine falls silent.
        quick = {"worker": 0.1, "agent": 0.2, JOINED: DEBOUNCE_S, DRAINED: 0.0}
        return quick.get(kind, NODE_TIMEOUT_S)


@dataclass(frozen=True)
class Pace:
    """One generation, from the moment it trains: which steps it copies, and how long its first n take.

    ``start``: the step that it resumed from. ``gap``: steps from one snapshot to the next, after the first
    ``warm`` ones; 0: none is taken. Saves come with step ``first_save`` of it and every ``save_gap`` from
    then on; each costs ``save_s`` more than the snapshots that are due anyway.
    """

    start: int
    step_s: float
    gap: int
    warm: int
    snapshot_s: float
    first_save: int
    save_gap: int
    save_s: float
    commit_s: float

    def snapshots(self, steps: int) -> int:
        """How many snapshots the first ``steps`` of it take, those that only a save wants left out."""
        if not self.gap:
            return 0
        begun = min(steps, self.warm)
        return begun + (self.start + steps) // self.gap - (self.start + begun) // self.gap

    def saves(self, steps: int) -> int:
        """How many of its first ``steps`` are saved."""
        return 0 if steps < self.first_save else 1 + (steps - self.first_save) // self.save_gap

    def stalled_s(self, steps: int) -> float:
        """What copies have cost when so many steps are finished."""
        return self.snapshots(steps) * self.snapshot_s + self.saves(steps) * self.save_s

    def time_of(self, steps: int) -> float:
        """Seconds until so many steps are finished, with their copies."""
        return steps * self.step_s + self.stalled_s(steps)

    def steps_in(self, seconds: float) -> int:
        """How many steps are finished in so many seconds."""
        most = int(seconds / self.step_s) + 1
        return bisect.bisect_right(range(most + 1), seconds, key=self.time_of) - 1 if most < _BEYOND else 0

    def newest_snapshot(self, steps: int) -> int:
        """The newest of its first ``steps`` that was copied; 0: none."""
        if not self.gap:
            return self._newest_save(steps)
        regular = (self.start + steps) // self.gap * self.gap - self.start
        return max(0, regular, min(steps, self.warm), self._newest_save(steps))

    def newest_commit(self, seconds: float) -> int:
        """The newest step that is on disk after so many seconds of training; 0: none of this generation."""
        return self._newest_save(self.steps_in(max(0.0, seconds - self.commit_s)))

    def _newest_save(self, steps: int) -> int:
        saves = self.saves(steps)
        return self.first_save + (saves - 1) * self.save_gap if saves else 0


def snapshot_cost_s(state_bytes: int, *, copy_bytes_per_s: float, cores: int, step_s: float) -> float:
    """Seconds that a snapshot adds to training: a core's time for the copy, and what of it outlasts a step.

    The copy has to be whole before the next optimizer step. On two cores it measured 0.4 to 0.8 of the copy.
    """
    copy_s = state_bytes / copy_bytes_per_s
    return copy_s / cores + max(0.0, copy_s - step_s)


def pace(job: Job, *, start: int, nodes: int, mtbf_s: float) -> Pace:
    """Ask the policy when copies are made, in a generation of so many nodes."""
    step_s = job.step_on(nodes)
    gap = warm = 0
    if job.slots > 1 and not job.snapshot_every.off:
        gap = cadence.snapshot_gap(job.snapshot_every, step_s=step_s, cost_s=job.snapshot_s, mtbf=mtbf_s)
        warm = WARM_SNAPSHOTS if job.snapshot_every == AUTO else 1
    # Without memory training itself writes, and waits for the disk.
    save_s = job.snapshot_s if job.slots else job.commit_s
    mean_s = step_s + (job.snapshot_s / gap if gap else 0.0)
    cost = SaveCost(0.0 if job.slots else save_s, job.commit_s)  # a saver counts what its own thread waits

    def is_due(after: int, since: int) -> bool:
        saved, since_s = start + since, after * mean_s
        known = cost if since or job.save_every != AUTO else None
        due = cadence.is_due(
            job.save_every, step=saved + after, saved_step=saved, since_s=since_s, cost=known, mtbf=mtbf_s
        )
        return due and (since == 0 or since_s >= job.commit_s)  # one at a time

    first = _least(lambda after: is_due(after, 0))
    if job.save_every.steps is not None and first < _BEYOND:
        # Multiples: the same number of steps lies between any two of them.
        save_gap = max(job.save_every.steps, math.ceil(job.commit_s / mean_s))
    else:
        save_gap = _least(lambda after: is_due(after, first))
    if gap and job.save_every.steps is not None and save_gap % gap == 0:
        save_s = 0.0  # each save finds a snapshot that is due anyway
    return Pace(start, step_s, gap, warm, job.snapshot_s, first, save_gap, save_s, job.commit_s)


def _least(holds: Callable[[int], bool]) -> int:
    """The least number from 1 on of which ``holds``, as it does of all greater ones; or one beyond."""
    high = 1
    while not holds(high):
        if high >= _BEYOND:
            return _BEYOND
        high *= 2
    low = high // 2
    return low + 1 + bisect.bisect_left(range(low + 1, high + 1), True, key=holds)


def load_s(job: Job, plan: ResumePlan) -> float:
    """Seconds in which every node loads what ``plan`` says; reading, sending and loading overlap."""
    if plan.kind == "cold":
        return 0.0
    from_disk = any(copy.tier == DISK for _, copy in plan.holders)
    read_s = job.state_bytes / (job.disk_bytes_per_s * DISK_READ_SHARE) if from_disk else 0.0
    # In units of the image over one link, see `source.streams`.
    units = max((len(stream.receivers).bit_length() for stream in streams(plan)), default=0)
    sent_s = units * job.state_bytes / (job.link_bytes_per_s * LINK_SHARE)
    return max(job.state_bytes / LOAD_BYTES_PER_S, read_s, sent_s)
