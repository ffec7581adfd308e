"""A job with failures, on fake time: what goodput it gets, what it loses, how it recovers.

Discrete events: between two of them nothing happens that has to be looked at, so a month of ten thousand
nodes takes seconds. The project's own policy decides: `policy/cadence.py` when copies are made (through
`simulate_job.pace`), `policy/source.py` what a resume finds on those that are left and who sends it to
whom, `policy/restart.py` whether the job goes on, pauses, or leaves a node out. The rendezvous is not
played but stated: a world forms of all that are up, up to ``nodes``, when they are ``min_nodes`` and have a
quorum; who is beyond that is a spare, and steps in with the next restart; one who comes while there is room
causes a restart, before which everybody finishes the step and copies it.

Promise: the same job, strikes and length give the same `Outcome`, and its parts add up to the whole. Words
are those of the report: *waiting* is all time without a world, whether a failure is not known yet or nodes
are missing; *repeated* is also the step that a failure cut off. *fewer* is what steps took longer because
nodes were away (or shorter, where nodes share cores: then it is below 0).

Does not know what nodes disagree about, what disks and links do under load, nor how failures really come.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elastic_resume.faults.rates import KINDS, Strike
from elastic_resume.faults.simulate_job import DRAINED, FORM_S, JOINED, SETTLE_S, Job, Pace, load_s, pace
from elastic_resume.faults.simulate_nodes import Copies, Machines
from elastic_resume.policy import cadence, failures, restart, source

PARTS = ("productive", "starting", "restoring", "stalled", "repeated", "waiting", "fewer")


@dataclass(frozen=True)
class Recovery:
    """A time without training, from a failure or a newcomer to the next step.

    ``lost``: finished steps that are run again. ``tier``: where the copy lay, "" of a cold start.
    """

    at_s: float
    kind: str
    seconds: float
    lost: int
    tier: str


@dataclass(frozen=True)
class Outcome:
    """What came of it: seconds of the job's time by `PARTS`, which add up to ``total_s``.

    ``missing_s`` of the waiting was for nodes, too few of which were up; ``ended_s`` came after the job had
    given up, for the reason ``gave_up``. ``struck``: failures that hit a machine that was up, by kind.
    """

    total_s: float
    spent_s: dict[str, float]
    missing_s: float
    ended_s: float
    steps: int
    struck: dict[str, int]
    recoveries: tuple[Recovery, ...]
    gave_up: str = ""

    @property
    def goodput(self) -> float:
        """The share of the time in which all nodes trained on what counts."""
        return self.spent_s["productive"] / self.total_s

    @property
    def failures(self) -> tuple[Recovery, ...]:
        """Recoveries from failures, without those for newcomers."""
        return tuple(one for one in self.recoveries if one.kind != JOINED)


def play(job: Job, strikes: Iterable[Strike], duration_s: float) -> Outcome:
    """Let the job run for so long under these strikes, which come in order of time."""
    one = _Play(job, iter(strikes), duration_s)
    return one.run()


@dataclass
class _Stop:
    """Why nobody trains: since when, and from when on that is known."""

    began_s: float
    kind: str
    known_s: float


class _EndError(Exception):
    """The time is over, or the job is."""


class _Play:
    """One job's life. `_until` alone moves the time."""

    def __init__(self, job: Job, strikes: Iterator[Strike], duration_s: float) -> None:
        self._job = job
        self._strikes = strikes
        self._next = next(strikes, None)
        self._end_s = duration_s
        self._now_s = 0.0
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._missing_s = 0.0
        self._machines = Machines(job.nodes + job.spares)
        self._copies = Copies(
            job.nodes + job.spares, slots=job.slots, commit_s=job.commit_s, copy_s=job.copy_s
        )
        self._hit: list[int] = []  # of the world, by the newest strike
        self._generation = 0
        self._step = 0
        self._top = 0
        self._limits = restart.Limits(job.max_no_progress, min_nodes=job.min_nodes)
        self._history: list[restart.Round] = []  # since the last progress
        self._failed_rounds = 0
        self._stop = _Stop(0.0, "", SETTLE_S)
        self._struck: Counter[str] = Counter()
        self._recoveries: list[Recovery] = []
        self._gave_up = ""

    def run(self) -> Outcome:
        """Play to the end."""
        try:
            while True:
                if self._form() and self._recover():
                    self._train()
        except _EndError:
            pass
        ended_s = self._end_s - self._now_s  # of a job that gave up
        self._spent["waiting"] += ended_s
        behind_s = (self._top - self._step) * self._job.step_on(self._job.nodes)
        self._spent["productive"] -= behind_s
        self._spent["repeated"] += behind_s
        return Outcome(
            self._end_s,
            self._spent,
            self._missing_s,
            ended_s,
            self._step,
            dict(self._struck),
            tuple(self._recoveries),
            self._gave_up,
        )

    # ---- time, and what comes with it --------------------------------------------------------------------

    def _until(self, end_s: float, *, room: bool) -> str:
        """Go on to ``end_s``, or to the next event that the world does not live through; give its kind.

        ``room``: whether a newcomer is such an event where the world is not full.
        """
        machines = self._machines
        while True:
            strike_s = self._next.at_s if self._next else math.inf
            return_s = machines.next_return_s
            at_s = min(strike_s, return_s, end_s, self._end_s)
            self._now_s = max(self._now_s, at_s)
            if at_s in (self._end_s, end_s):
                return ""
            if at_s == return_s:
                machines.come_back()
                if room and len(machines.world) < self._job.nodes:
                    return JOINED
                continue
            struck, self._next = self._next, next(self._strikes, None)
            if struck and self._strike(struck):
                return struck.kind

    def _strike(self, struck: Strike) -> bool:
        """Let a failure happen; whether it hits the world."""
        machines, away = self._machines, KINDS[struck.kind].away
        self._hit = [node for node in struck.nodes if node in machines.world]
        if self._hit or (away and any(node in machines.idle for node in struck.nodes)):
            self._struck[struck.kind] += 1
        away_s = self._job.away_s[away] if away and struck.away_s is None else struck.away_s or 0.0
        for node in struck.nodes if away else ():
            machines.go(node, self._now_s + away_s, silently=away != "agent")
            self._copies.leave(node, self._now_s, wiped=away == "replacement")
        return bool(self._hit)

    def _spend(self, what: str, end_s: float, *, room: bool = False) -> str:
        """Let time pass until then, as ``what``, or until something comes between, whose kind is given."""
        began_s = self._now_s
        kind = self._until(end_s, room=room)
        self._spent[what] += self._now_s - began_s
        if self._now_s >= self._end_s:
            raise _EndError
        if kind:
            known_s = self._now_s + self._job.noticed_after_s(kind)
            # One that was to be known soon is: the restart that it causes serves both.
            waits = began_s < self._stop.known_s
            self._stop.known_s = min(known_s, self._stop.known_s) if waits else known_s
        return kind

    # ---- from a stop to the next step --------------------------------------------------------------------

    def _form(self) -> bool:
        """Wait until the stop is known and there are enough nodes; form the next world, unless disturbed."""
        if self._spend("waiting", self._stop.known_s) or self._spend("waiting", self._now_s + FORM_S):
            return False
        if self._obey() and self._spend("waiting", self._now_s + restart.pause_s(self._history)):
            return False
        began_s = self._now_s
        try:
            while not self._machines.may_form(self._job.min_nodes):
                # Just behind the moment in which the next one comes back.
                self._spend("waiting", math.nextafter(self._machines.next_return_s, math.inf))
        finally:
            self._missing_s += self._now_s - began_s
        if not self._machines.world:
            self._copies.forget()
        self._machines.form(self._job.nodes)
        self._generation += 1
        return True

    def _obey(self) -> bool:
        """Do what the policy says of the last round; whether it was one that failed."""
        if not self._history or not self._history[-1].failed:
            return False
        names: tuple[str, ...] = ()
        if len(self._history) > self._limits.max_no_progress:  # before, it does not matter who is there
            names = tuple(f"n{node}" for node in self._machines.world)
        decision = restart.decide(self._history, self._limits, restart.World(names, self._top))
        if decision.give_up:
            self._gave_up = decision.reason
            raise _EndError
        if decision.node:
            node = int(decision.node[1:])
            self._machines.go(node, self._now_s + self._job.away_s["replacement"], silently=False)
            self._copies.leave(node, self._now_s, wiped=True)
            self._history.clear()
        return True

    def _recover(self) -> bool:
        """Start workers and load the newest copy; False when something has come between."""
        job, world = self._job, self._machines.world
        start_s = job.start_s + (job.cold_s if self._generation == 1 else 0.0)
        kind = self._spend("starting", self._now_s + start_s, room=True)
        if not kind:
            reached = (self._generation - 1, self._step)
            plan = source.choose(self._copies.inventories(world, reached, self._now_s), "auto")
            kind = self._spend("restoring", self._now_s + load_s(job, plan), room=True)
        if kind:
            self._note(kind, None)
            return False
        held = (plan.source_generation, plan.step) if plan.kind == "checkpoint" else None
        self._copies.loaded(held, world)
        if self._stop.kind:
            # A node that comes back after a cold start may hold more than was trained since.
            lost, seconds = max(0, self._step - plan.step), self._now_s - self._stop.began_s
            one = Recovery(self._stop.began_s, self._stop.kind, seconds, lost, plan.source_tier)
            self._recoveries.append(one)
        self._step = plan.step
        return True

    # ---- training ----------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Train until something happens."""
        mtbf_s = cadence.mtbf_s(self._failed_rounds, self._now_s)
        one = pace(self._job, start=self._step, nodes=len(self._machines.world), mtbf_s=mtbf_s)
        began_s = self._now_s
        self._copies.train(one, self._generation, began_s)
        kind = self._until(self._end_s, room=True)
        last = None
        if kind == JOINED:
            # The others train on while it is let in, finish their step, and copy it.
            last = 1 + one.steps_in(self._now_s + self._job.noticed_after_s(JOINED) - began_s)
            kind = self._until(began_s + one.time_of(last), room=False) or JOINED
        took_s = self._now_s - began_s
        drained = kind == JOINED and self._now_s < self._end_s
        steps = last if drained and last else one.steps_in(took_s)
        left = len(self._machines.world)
        torn = () if kind == JOINED else [node for node in self._hit if node in self._machines.world]
        self._copies.stop(self._now_s, steps, torn=torn, left=left, drained=drained)
        self._account(one, steps, took_s, cut_off=kind not in {"", JOINED})
        if self._now_s >= self._end_s:
            raise _EndError
        self._note(kind, steps)
        known_s = self._now_s + self._job.noticed_after_s(DRAINED if drained else kind)
        self._stop = _Stop(self._now_s, kind, known_s)

    def _account(self, one: Pace, steps: int, took_s: float, *, cut_off: bool) -> None:
        full_s = self._job.step_on(self._job.nodes)
        again = min(steps, self._top - self._step)
        under_way_s = took_s - one.time_of(steps)
        self._spent["stalled"] += one.stalled_s(steps)
        self._spent["repeated"] += again * one.step_s + (under_way_s if cut_off else 0.0)
        self._spent["productive"] += (steps - again) * full_s + (0.0 if cut_off else under_way_s)
        self._spent["fewer"] += (steps - again) * (one.step_s - full_s)
        self._step += steps
        self._top = max(self._top, self._step)

    def _note(self, kind: str, steps: int | None) -> None:
        """Add a round to the history, as a node's agent would."""
        failed = kind in {"worker", "hang"}
        causes: tuple[failures.Failure, ...] = ()
        if failed:
            what = failures.HANG if kind == "hang" else failures.SIGNAL
            causes = (failures.Failure(what, f"n{self._hit[0]}", self._hit[0], "was killed by SIGKILL"),)
            self._failed_rounds += 1
        first = None if steps is None else self._step - steps
        newest = None if steps is None else self._step
        this = restart.Round(failed, first, newest, causes, max(1, len(self._machines.world)))
        if this.stepped:
            self._history.clear()
        self._history.append(this)
