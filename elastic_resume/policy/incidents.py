"""What ended each generation of a job, and what that cost: the one derivation of incidents. Pure.

A `Tally` folds events into what is known of each generation (`Turn`). `end_of` then names the cause:

1. The agents' verdict, which rests on the order in which their leader heard of failures and not on clocks.
2. Without one, the same judgement of the same failures (`failures.dated`): a death or exception that nothing
   else explains comes before a node that fell silent, and both before the echo of a peer's death.
3. Else the reason that the leader gave.

Exits of workers that were told to stop are no failures. A live status and its metrics feed the tally one
event at a time, in any order, and it remembers the newest `KEPT` generations; its sums forget nothing. A
report feeds it all events at once (`fold`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, NamedTuple

from elastic_resume.events import MAX_COUNT, Event, booted, count_of, time_of
from elastic_resume.policy import failure_classification
from elastic_resume.policy.failure_classification import Failure, describe

KEPT = 64
MOST_FAILURES = 256
"""Events of failed workers that are kept of a generation while a job runs: its verdict tells of all."""
UNKNOWN, JOB = "unknown", "job"
STOPPED, JOINED, FINISHED, OPEN = "stopped", "joined", "finished", "open"
KINDS = (*failure_classification.KINDS, JOB, UNKNOWN)
"""Ends that are failures."""
BOUNDS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Of the histogram of recoveries, the last one open: from a warm restart to a large state sent anew."""
GROWN = "newcomers are here"
"""Why a leader ends a world that nothing befell (`rendezvous.leading`)."""
_RESTART = re.compile(r"generation (\d{1,16}) is over: (.*)", re.DOTALL)
_OF_WORKERS = frozenset({"failure", "worker-exit", "hang", "hang-over"})
_LOST, _STAYS, _SIGNALLED, _FAILED, _DONE = "lost", "stays", "signalled", "failed", "done"
_FATES = {"signalled": _SIGNALLED, "left": _SIGNALLED, "failed": _FAILED, "done": _DONE}


@dataclass(frozen=True, slots=True)
class End:
    """Why a generation ended.

    ``kind``: of `KINDS` if that was a failure; else stopped (all of the job was told to), joined, finished,
    or open (it runs, or was killed as a whole). ``node`` and ``rank`` failed first. ``also``: other failures
    of their own; ``cascade``: what followed. ``t`` None: the cause left no time behind.
    """

    kind: str
    text: str
    t: float | None = None
    node: str = ""
    rank: int | None = None
    also: tuple[str, ...] = ()
    cascade: tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        """Whether this end counts as an incident."""
        return self.kind in KINDS


@dataclass(frozen=True, slots=True)
class Incident:
    """A failure that ended a generation, and its cost. Times are Unix seconds, spans are seconds."""

    generation: int
    kind: str
    cause: str
    t: float | None
    lost_steps: int | None = None
    recovered_s: float | None = None
    """From the first sign to the first step of the next generation; None while that is to come."""
    node: str = ""
    rank: int | None = None


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


class _Fate(NamedTuple):
    """What became of a node's agent at the end of a generation: lost, stays, signalled, failed or done."""

    how: str
    t: float | None
    text: str = ""


@dataclass(slots=True)
class _Place:
    """The generation of a node: when it heard of that, when its workers last wrote, its agent's process."""

    generation: int
    since: float
    last: float
    pid: int | None  # None: not told


@dataclass(slots=True)
class Turn:
    """What is known of one generation.

    ``named`` are its nodes as its resume lists them, ``nodes`` those that were heard of, ``size`` how many
    there are. ``lost_steps`` are of the generation before, as its ranks noted their steps: a power cut may
    have taken some notes. ``outlived``: an agent of it was in the next one, to which it would have told a
    failure. ``changes`` counts what was taken in.
    """

    began: float | None = None
    named: tuple[str, ...] = ()
    nodes: set[str] = field(default_factory=set)
    size: int = 0
    start_step: int | None = None
    lost_steps: int | None = None
    first_step_t: float | None = None
    last_step: int | None = None
    stepped_t: float | None = None
    last_t: float | None = None
    ended: set[int | None] = field(default_factory=set)
    ended_nodes: set[str] = field(default_factory=set)
    events: dict[str, list[Event]] = field(default_factory=dict)
    kept: int = 0
    stopped_t: float | None = None
    noticed_t: float | None = None
    reason: str = ""
    causes: tuple[Failure, ...] = ()
    cascade: tuple[Failure, ...] = ()
    fates: dict[str, _Fate] = field(default_factory=dict)
    outlived: bool = False
    changes: int = 0

    @property
    def members(self) -> frozenset[str]:
        """Its nodes, as far as they are known."""
        return frozenset(self.named or self.nodes)

    @property
    def is_whole(self) -> bool:
        """Whether `members` are all."""
        return bool(self.named) or len(self.nodes) >= self.size


class Tally:
    """The incidents of one job, as far as one node hears of them."""

    def __init__(self, kept: int = KEPT, most_failures: int = MOST_FAILURES) -> None:
        """``kept``: how many generations are remembered; ``most_failures``: events of each one's failures."""
        self._kept = kept
        self._most_failures = most_failures
        self._turns: dict[int, Turn] = {}
        self._at: dict[str, _Place] = {}  # by node
        self._agents: dict[str, int | None] = {}  # process of each node's agent
        self._forgotten = Sums()
        self._zeros: dict[str, float] = {}  # when each boot was, by the first that was heard of it
        self._told: dict[int, tuple[tuple[int, ...], Incident | None]] = {}

    def take(self, event: Event, newest: int = MAX_COUNT) -> None:
        """Take in one event; one of a kind or form that says nothing here changes nothing.

        ``newest``: no generation beyond it can have begun. One that a broken node made up would have those
        forgotten that have.
        """
        t, since = time_of(event), booted(event)
        if t is not None and since is not None:  # a wall clock may jump
            t = since[1] + self._zeros.setdefault(since[0], t - since[1])
        if t is not None and (count_of(event, "generation") or 0) <= newest:
            self.add(event, t, newest)

    def add(self, event: Event, t: float, newest: int = MAX_COUNT) -> None:
        """Take in an event that happened at ``t``, a time that is comparable with the others'."""
        kind, node = event.get("event"), str(event.get("node", ""))
        generation = count_of(event, "generation") or None
        if kind == "round":
            self._round(event, node, generation, t)
        elif kind == "agent-start":
            self._agent_start(event, node, t)
        elif kind == "agent-end":
            self._agent_end(event, node, t)
        elif kind == "rendezvous":
            self._rendezvous(event, node, t, newest)
        elif kind in _OF_WORKERS:
            self._worker(event, node, generation, t)
        elif generation is None:
            return
        elif kind == "resume":
            _resume(self._turn(generation), event, t)
        elif kind == "worker-start":
            self._began(node, generation, t)
            turn = self._turn(generation)
            if turn.start_step is None:
                turn.start_step = count_of(event, "step")
        elif kind == "verdict":
            turn = self._turn(generation)
            turn.causes = turn.causes or _failures(event.get("causes"))
            turn.cascade = turn.cascade or _failures(event.get("cascade"))
        elif kind in {"step", "commit", "run-end"}:
            self._step(event, node, generation, t)

    # ---- events of workers ---------------------------------------------------------------------------

    def _step(self, event: Event, node: str, generation: int, t: float) -> None:
        turn, step = self._turn(generation), count_of(event, "step")
        if step is not None:
            turn.last_step = max(step, turn.last_step or 0)
        if event["event"] == "commit":  # whose process may outlive the generation
            return
        turn.last_t = max(t, turn.last_t or t)
        if event["event"] == "step":
            turn.first_step_t = min(t, turn.first_step_t or t)
            turn.stepped_t = max(t, turn.stepped_t or t)
        else:
            turn.ended.add(count_of(event, "rank"))
            turn.ended_nodes.add(node)
        place = self._at.get(node)
        if place and place.generation == generation:
            place.last = max(place.last, t)

    def _worker(self, event: Event, node: str, generation: int | None, t: float) -> None:
        place = self._at.get(node)
        if generation is None:
            if place is None or t < place.since:  # one of an earlier generation may be told again
                return
            generation = place.generation
        turn = self._turn(generation)
        turn.last_t = max(t, turn.last_t or t)
        if place and place.generation == generation and event["event"] != "worker-exit":
            place.last = max(place.last, t)
        if event["event"] == "worker-exit":
            if event.get("stopped"):
                turn.stopped_t = min(t, turn.stopped_t or t)
            failed = (event.get("exit_code") or event.get("signal")) and not event.get("stopped")
            # A stub whose agent died has stopped its worker by SIGKILL, which tells when that was.
            if not (failed or event.get("stuck") or event.get("signal") == "SIGKILL"):
                return
        elif event["event"] == "hang":
            turn.noticed_t = min(t, turn.noticed_t or t)
        if turn.kept < self._most_failures:
            turn.kept += 1
            turn.events.setdefault(node, []).append({**event, "t": t, "traceback": None})

    # ---- events of agents ----------------------------------------------------------------------------

    def _round(self, event: Event, node: str, generation: int | None, t: float) -> None:
        place, pid = self._at.get(node), count_of(event, "pid") or None
        before = place.pid if place else None
        self._agents[node] = pid
        if place and pid and before and t >= place.since and generation != place.generation:
            turn = self._turn(place.generation)
            if pid != before:
                turn.fates.setdefault(node, _Fate(_LOST, place.last))
            elif generation is None or generation > place.generation:
                turn.fates.setdefault(node, _Fate(_STAYS, t))
                turn.outlived |= generation is not None
        if generation:
            self._began(node, generation, t)
            turn = self._turn(generation)
            turn.size = max(turn.size, count_of(event, "num_nodes") or 0)

    def _began(self, node: str, generation: int, t: float) -> None:
        """A node takes part in a generation."""
        turn, place = self._turn(generation), self._at.get(node)
        turn.began = min(t, turn.began or t)
        turn.nodes.add(node)
        if place is None or place.generation != generation:
            if place is None or t >= place.since:
                self._at[node] = _Place(generation, t, t, self._agents.get(node))
        else:
            place.last = max(place.last, t)

    def _agent_start(self, event: Event, node: str, t: float) -> None:
        place = self._at.get(node)
        self._agents[node] = count_of(event, "pid") or None
        if place and t >= place.since:
            self._turn(place.generation).fates.setdefault(node, _Fate(_LOST, place.last))
        begun = (n for n, turn in self._turns.items() if turn.began is not None and turn.began < t)
        newest = max(begun, default=0)
        if newest and node in self._turns[newest].named and (not place or place.generation < newest):
            self._turn(newest).fates.setdefault(node, _Fate(_LOST, None))  # its log was lost with its disk

    def _agent_end(self, event: Event, node: str, t: float) -> None:
        place, how = self._at.get(node), _FATES.get(str(event.get("outcome")))
        if place and how and t >= place.since:
            text = event.get("message")
            said = text.removeprefix(f"node {node} leaves the job: ") if isinstance(text, str) else ""
            self._turn(place.generation).fates.setdefault(node, _Fate(how, t, said))

    def _rendezvous(self, event: Event, node: str, t: float, newest: int) -> None:
        place, what = self._at.get(node), event.get("what")
        told = _RESTART.fullmatch(str(event.get("message", ""))) if what == "restart" else None
        if told and 0 < int(told[1]) <= newest:
            turn = self._turn(int(told[1]))
            turn.reason = told[2]
            turn.noticed_t = min(t, turn.noticed_t or t)
        elif what == "leader-lost" and place and t >= place.since:
            turn = self._turn(place.generation)
            turn.noticed_t = min(t, turn.noticed_t or t)

    # ---- what is told --------------------------------------------------------------------------------

    def turn(self, number: int) -> Turn:
        """Give what is known of a generation."""
        return self._turns.get(number, Turn())

    def incidents(self) -> list[Incident]:
        """Give those that are remembered, in order."""
        known = sorted(number for number, turn in self._turns.items() if turn.began is not None)
        found = [self._incident(number, following) for number, following in pairwise(known)]
        return [one for one in found if one is not None]

    def _incident(self, number: int, following: int) -> Incident | None:
        """The failure that ended a generation; made anew when more is known."""
        turn, later = self._turns[number], self._turns[following]
        known = (turn.changes, following, later.changes)
        if number not in self._told or self._told[number][0] != known:
            end, t, lost, recovered = judge(turn, later)
            one = Incident(number, end.kind, end.text, t, lost, recovered, end.node, end.rank)
            self._told[number] = (known, one if end.is_failure else None)
        return self._told[number][1]

    def sums(self) -> Sums:
        """Sum up all incidents, those that are forgotten too."""
        before = self._forgotten
        sums = Sums(Counter(before.incidents), before.lost_steps, list(before.recoveries), before.recovery_s)
        for incident in self.incidents():
            sums.add(incident)
        return sums

    def _turn(self, number: int) -> Turn:
        """The turn of that number; of one that is older than all that are remembered none that counts."""
        if number not in self._turns:
            if len(self._turns) >= self._kept:
                if number < min(self._turns):
                    return Turn()
                self._forget()
            self._turns[number] = Turn()
        turn = self._turns[number]
        turn.changes += 1
        return turn

    def _forget(self) -> None:
        """Sum the oldest up. Whatever is still told of it is too late."""
        oldest = min(self._turns)
        following = min(
            (n for n, turn in self._turns.items() if turn.began is not None and n > oldest), default=None
        )
        if following is not None and self._turns[oldest].began is not None:
            incident = self._incident(oldest, following)
            if incident is not None:
                self._forgotten.add(incident)
        del self._turns[oldest]
        self._told.pop(oldest, None)


def fold(events: Iterable[tuple[float, Event]]) -> Tally:
    """Make a tally of all events of a run, each with its time, in order; it forgets none."""
    tally = Tally(MAX_COUNT, MAX_COUNT)
    for t, event in events:
        tally.add(event, t)
    return tally


def _resume(turn: Turn, event: Event, t: float) -> None:
    named, lost = event.get("nodes"), count_of(event, "lost_steps")
    turn.began = min(t, turn.began or t)
    if isinstance(named, list):
        turn.named = tuple(name for name in named if isinstance(name, str)) or turn.named
    turn.lost_steps = lost if turn.lost_steps is None else max(lost or 0, turn.lost_steps)
    step = count_of(event, "step")
    turn.start_step = turn.start_step if step is None else step


# ---- the cause -----------------------------------------------------------------------------------------

_DEFINITE, _SILENT, _ECHO = 0, 1, 2
_Signs = list[tuple[float | None, Failure]]


class Judgement(NamedTuple):
    """Why a generation ended, when that was first seen, and what it cost; see `Incident`."""

    end: End
    t: float | None
    lost_steps: int | None
    recovered_s: float | None


def judge(turn: Turn, following: Turn | None) -> Judgement:
    """Judge the end of a generation; ``following`` is the next one, None while there is none."""
    fates = _fates(turn, following)
    signs = _signs(turn, fates)
    end = _end(turn, following, fates, signs)
    seen = [t for t in (*(t for t, _ in signs), turn.noticed_t) if t is not None]
    noticed = min(seen, default=turn.stopped_t)
    if following is None:
        return Judgement(end, noticed, None, None)
    told = [] if following.lost_steps is None else [following.lost_steps]
    if following.start_step is not None and turn.last_step is not None:
        told.append(max(0, turn.last_step - following.start_step))
    recovered_s = None
    first = noticed if noticed is not None else turn.last_t
    if end.kind != FINISHED and first is not None and following.first_step_t is not None:
        recovered_s = round(max(0.0, following.first_step_t - first), 3)
    return Judgement(end, noticed, max(told, default=None), recovered_s)


def _end(turn: Turn, following: Turn | None, fates: Mapping[str, _Fate], signs: _Signs) -> End:
    causes, cascade = _judged(turn, signs)
    own = [one for one in causes if turn.causes or not one[1].is_echo]
    if _is_finished(turn, fates, own):
        return End(FINISHED, "finished")
    gone = _all_gone(turn, following, fates, own, signs)
    if gone is not None:
        return gone
    if own:
        return _failed(causes, cascade)
    joined = sorted(following.members - turn.members) if following and turn.is_whole else []
    told = tuple(_text(one) for _, one in signs)
    if joined and following and following.named:
        # Agents stop their workers one after the other: an echo is all that a join leaves.
        return End(JOINED, f"{_names(joined)} joined", cascade=told)
    if turn.reason == GROWN or (turn.outlived and not turn.reason):
        return End(JOINED, "nodes came that left again", cascade=told)
    if causes:
        return _failed(causes, cascade)
    if following is not None:
        return End(UNKNOWN, turn.reason or "ended without a record of why")
    failed = [fate for fate in fates.values() if fate.how == _FAILED]
    if failed:
        return End(UNKNOWN, failed[0].text or "the agents gave up", t=failed[0].t)
    return End(OPEN, "still running, or killed as a whole")


def _fates(turn: Turn, following: Turn | None) -> dict[str, _Fate]:
    """What became of each node. A silent one is lost if the others went on, or gave up, without it."""
    fates = dict(turn.fates)
    gave_up = following is None and any(fate.how == _FAILED for fate in fates.values())
    missing = turn.members - following.members if following is not None and following.is_whole else set()
    for node in sorted(turn.members if gave_up else missing):
        fates.setdefault(node, _Fate(_LOST, None))
    return fates


def _signs(turn: Turn, fates: Mapping[str, _Fate]) -> _Signs:
    """Every failure that the events show, the likeliest cause first."""
    dated: set[str] = set()
    found: list[tuple[int, float, float | None, Failure]] = []
    for node, events in turn.events.items():
        is_lost = node in fates and fates[node].how == _LOST
        kills = [one for one in events if one["event"] == "worker-exit" and one.get("signal") == "SIGKILL"]
        told = [one for one in events if not (is_lost and one in kills)]
        for t, failure in failure_classification.dated(told, node):
            found.append((_ECHO if failure.is_echo else _DEFINITE, t, t, failure))
        if is_lost and kills:  # a worker's stub sees its agent die: it alone can tell the moment
            killed_t = kills[0]["t"]
            found.append((_DEFINITE, killed_t, killed_t, failure_classification.lost(node, "was lost")))
            dated.add(node)
    for node, fate in fates.items():
        if fate.how == _LOST and node not in dated:
            # Nobody steps without it, so it lived when the others did that last.
            alive = max((t for t in (turn.stepped_t, fate.t) if t is not None), default=None)
            order = float("inf") if alive is None else alive
            found.append((_SILENT, order, alive, failure_classification.lost(node, "was lost")))
        elif fate.how == _SIGNALLED:
            text = f"left: {fate.text or 'stopped by a signal.'}"
            found.append(
                (_DEFINITE, fate.t or 0.0, fate.t, failure_classification.lost(node, text, told=True))
            )
    found.sort(key=lambda one: (not one[3].at_fault, *one[:2]))
    return [(t, failure) for _, _, t, failure in found]


def _judged(turn: Turn, signs: _Signs) -> tuple[_Signs, _Signs]:
    """Causes and what followed from them; the agents' verdict goes before what events show.

    A cause whose own log is lost has left no sign but the verdict.
    """
    if not turn.causes:
        own = [one for one in signs if not one[1].is_echo] or signs[:1]
        return own, [one for one in signs if one not in own]
    left = list(signs)
    causes: _Signs = []
    for cause in turn.causes:
        sign = next((one for one in left if _is_same(one[1], cause)), None)
        if sign:
            left.remove(sign)
        says_why = sign is not None and sign[1].kind == failure_classification.PREEMPTED  # the node itself
        causes.append(sign if sign and says_why else (sign[0] if sign else None, cause))
    cascade: _Signs = [(None, one) for one in turn.cascade]
    for one in left:
        if not any(_is_same(one[1], other) for other in turn.cascade):
            (cascade if one[1].is_echo else causes).append(one)
    return causes, cascade


def _is_same(one: Failure, other: Failure) -> bool:
    of_node = other.kind in failure_classification.OF_NODES
    same = (one.kind in failure_classification.OF_NODES) if of_node else one.rank == other.rank
    return one.node == other.node and same


def _is_finished(turn: Turn, fates: Mapping[str, _Fate], own: _Signs) -> bool:
    """Whether its work was done. What failed after that ended nothing."""
    if not turn.ended and not any(fate.how == _DONE for fate in fates.values()):
        return False
    for _, one in own:
        if one.kind not in failure_classification.OF_NODES:
            if one.rank not in turn.ended:
                return False
        elif one.node not in turn.ended_nodes and (one.node in turn.nodes or not turn.ended):
            return False
    return True


def _all_gone(
    turn: Turn, following: Turn | None, fates: Mapping[str, _Fate], own: _Signs, signs: _Signs
) -> End | None:
    """Every node was told to stop, or died without a word: nobody was left to go on."""
    hows = {fate.how for fate in fates.values()}
    if (
        not hows
        or hows - {_LOST, _SIGNALLED}
        or any(one.kind not in failure_classification.OF_NODES for _, one in own)
    ):
        return None
    is_known = turn.is_whole and turn.members <= fates.keys()
    if not is_known and (_SIGNALLED not in hows or following is None or turn.causes):
        return None
    first = min((t for t, _ in signs if t is not None), default=None)
    cascade = tuple(_text(one) for _, one in signs if one.is_echo)
    if _SIGNALLED in hows:
        words = sorted({fate.text for fate in fates.values() if fate.how == _SIGNALLED and fate.text})
        return End(STOPPED, words[0].rstrip(".") if words else "stopped", t=first, cascade=cascade)
    return End(JOB, "whole job killed", t=first, cascade=cascade)


def _failed(causes: _Signs, cascade: _Signs) -> End:
    (t, root), *others = causes
    also = tuple(_text(one) for _, one in others)
    return End(root.kind, _text(root), t, root.node, root.rank, also, tuple(_text(one) for _, one in cascade))


def _text(failure: Failure) -> str:
    return describe(failure, node=True)


def _names(names: Sequence[str]) -> str:
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return ("nodes " if len(names) > 1 else "node ") + listed


def _failures(listed: Any) -> tuple[Failure, ...]:
    """The failures in a list of a verdict, as `agent.witness` wrote it."""
    return tuple(
        Failure(
            **{name: str(one.get(name) or "")[: failure_classification.MAX_TEXT] for name in _TEXTS},  # type: ignore[arg-type]
            rank=count_of(one, "rank"),
            step=count_of(one, "step"),
            nodes=count_of(one, "nodes") or 1,
        )
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, Mapping) and one.get("kind") in failure_classification.KINDS
    )


_TEXTS = tuple(one.name for one in fields(Failure) if one.type == "str")
