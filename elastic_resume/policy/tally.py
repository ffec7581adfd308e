"""What ended each world of a job, and its cost, as its events tell it one by one while it runs.

For those who look on; a report, which has all events at once, knows more. Pure. It promises to take any event
of any node in any order, to remember the newest `KEPT` generations, and that its sums never forget.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from elastic_resume.events import MAX_COUNT, Event, booted, count_of, time_of
from elastic_resume.policy import failures
from elastic_resume.policy.failures import Failure, describe

KEPT = 64
UNKNOWN = "unknown"
BOUNDS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Of the histogram of recoveries, the last one open: from a warm restart to a large state sent anew."""
GROWN = "newcomers are here"
"""Why a leader ends a world that nothing befell (`rendezvous.leading`)."""
_RESTART = re.compile(r"generation (\d{1,16}) is over: (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Incident:
    """What ended a generation, and what that cost. Times are seconds, since the epoch where not a span."""

    generation: int
    kind: str
    """Of `failures.KINDS`, or `UNKNOWN`."""
    cause: str
    t: float | None
    lost_steps: int | None = None
    recovered_s: float | None = None
    """From the first sign to the first step of the next generation; None while that is to come."""


@dataclass(slots=True)
class Sums:
    """Over all incidents. ``recoveries``: a count for each of `BOUNDS_S`, and one for what took longer."""

    incidents: Counter[str] = field(default_factory=Counter)
    lost_steps: int = 0
    recoveries: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    recovery_s: float = 0.0

    def add(self, one: Incident) -> None:
        """Count one more."""
        self.incidents[one.kind] += 1
        self.lost_steps += one.lost_steps or 0
        if one.recovered_s is not None:
            place = sum(one.recovered_s > bound for bound in BOUNDS_S)
            self.recoveries[place] += 1
            self.recovery_s += one.recovered_s


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a node is: in which generation, since when, and which process its agent is."""

    generation: int
    t: float
    pid: int  # 0: not told


@dataclass(slots=True)
class _Turn:
    """What is known of one generation."""

    began: bool = False
    reason: str = ""
    cause: Failure | None = None
    sign: float | None = None
    first_step: float | None = None
    start_step: int | None = None
    last_step: int | None = None
    lost_steps: int | None = None
    """Of the one before it, as ranks have noted their steps: a power cut may have taken what they noted."""
    stopped: bool = False
    """An agent of it ended as it was told to, or with the job."""
    outlived: bool = False
    """An agent of it was in the next one that it knew of: a failure would have been told to that one."""


class Tally:
    """The incidents of one job, as far as one node hears of them."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}
        self._at: dict[str, _Place] = {}  # by node
        self._forgotten = Sums()
        self._zeros: dict[str, float] = {}  # when each boot was, by the first that was heard of it

    def take(self, event: Event, newest: int = MAX_COUNT) -> None:
        """Take in one event; one of a kind or form that says nothing here changes nothing.

        ``newest``: no generation beyond it can have begun. One that a broken node made up would have those
        forgotten that have.
        """
        kind, t = event.get("event"), self._time_of(event)
        node, generation = str(event.get("node", "")), count_of(event, "generation")
        if t is None or (generation or 0) > newest:
            return
        if kind == "round" and generation:
            before, pid = self._at.get(node), count_of(event, "pid") or 0
            self._at[node] = _Place(generation, t, pid)
            self._turn(generation).began = True
            if before and pid and before.pid == pid and before.generation < generation:
                self._turn(before.generation).outlived = True
        elif kind == "resume" and generation:
            turn = self._turn(generation)
            turn.began, turn.lost_steps = True, count_of(event, "lost_steps")
            turn.start_step = count_of(event, "step")
        elif kind == "step" and generation:
            turn = self._turn(generation)
            turn.first_step = min(t, turn.first_step or t)
            turn.last_step = max(count_of(event, "step") or 0, turn.last_step or 0)
        elif kind == "verdict" and generation:
            turn = self._turn(generation)
            turn.cause = turn.cause or _first(event.get("causes"))
        elif kind == "rendezvous" and event.get("what") == "restart":
            told = _RESTART.fullmatch(str(event.get("message", "")))
            if told and int(told[1]) <= newest:
                turn = self._turn(int(told[1]))
                turn.reason = told[2]
                turn.sign = min(t, turn.sign or t)
        elif node in self._at and t >= self._at[node].t:  # one of an earlier generation may be told again
            turn = self._turn(self._at[node].generation)
            if _is_sign(event):
                turn.sign = min(t, turn.sign or t)
            elif kind == "agent-end" and str(event.get("outcome")) in {"done", "signalled"}:
                turn.stopped = True

    def _time_of(self, event: Event) -> float | None:
        """When it was, by a clock that does not jump while its machine is up."""
        t, since = time_of(event), booted(event)
        return t if t is None or since is None else since[1] + self._zeros.setdefault(since[0], t - since[1])

    def incidents(self) -> list[Incident]:
        """Give those that are remembered, in order."""
        known = sorted(number for number, turn in self._turns.items() if turn.began)
        found = []
        for number, following in pairwise(known):
            incident = _incident(number, self._turns[number], self._turns[following])
            if incident is not None:
                found.append(incident)
        return found

    def sums(self) -> Sums:
        """Sum up all incidents, those that are forgotten too."""
        before = self._forgotten
        sums = Sums(Counter(before.incidents), before.lost_steps, list(before.recoveries), before.recovery_s)
        for incident in self.incidents():
            sums.add(incident)
        return sums

    def _turn(self, number: int) -> _Turn:
        """The turn of that number; of one that is older than all that are remembered none that counts."""
        if number not in self._turns:
            if len(self._turns) == KEPT:
                if number < min(self._turns):
                    return _Turn()
                self._forget()
            self._turns[number] = _Turn()
        return self._turns[number]

    def _forget(self) -> None:
        """Sum the oldest up. Whatever is still told of it is too late."""
        oldest = min(self._turns)
        for incident in self.incidents()[:1]:
            if incident.generation == oldest:
                self._forgotten.add(incident)
        del self._turns[oldest]


def _incident(number: int, turn: _Turn, following: _Turn) -> Incident | None:
    """What ended a generation; None where nothing befell it: nodes came, or the job ended and began again."""
    grown = turn.reason == GROWN or (turn.outlived and not turn.reason)  # a leader alone writes the reason
    if turn.cause is None and (grown or turn.stopped):
        return None
    kind, cause = UNKNOWN, turn.reason or "no word of why"
    if turn.cause is not None:
        kind, cause = turn.cause.kind, describe(turn.cause, node=True)
    recovered_s = None
    if turn.sign is not None and following.first_step is not None:
        recovered_s = max(0.0, following.first_step - turn.sign)
    lost = following.lost_steps
    if following.start_step is not None and turn.last_step is not None:
        lost = max(lost or 0, turn.last_step - following.start_step)
    return Incident(number, kind, cause, turn.sign, lost, recovered_s)


def _is_sign(event: Event) -> bool:
    """Whether something went wrong on the node that tells this."""
    if event.get("event") == "worker-exit":
        return not event.get("stopped") and bool(event.get("exit_code") or event.get("signal"))
    return event.get("event") == "hang" or (
        event.get("event") == "rendezvous" and event.get("what") == "leader-lost"
    )


def _first(causes: Any) -> Failure | None:
    """The first failure of a verdict, as `agent.witness` wrote it."""
    first = causes[0] if isinstance(causes, list) and causes else None
    if not isinstance(first, Mapping) or first.get("kind") not in failures.KINDS:
        return None
    texts = {
        one.name: str(first.get(one.name) or "")[: failures.MAX_TEXT]
        for one in fields(Failure)
        if one.type == "str"
    }
    counts = {name: count_of(first, name) for name in ("rank", "step")}
    return Failure(**texts, **counts, nodes=count_of(first, "nodes") or 1)  # type: ignore[arg-type]
