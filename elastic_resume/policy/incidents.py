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

from elastic_resume.events import MAX_COUNT_VALUE, Event, get_boot_time, get_count, get_seconds
from elastic_resume.policy import failure_classification
from elastic_resume.policy.failure_classification import Failure, describe_failure

MAX_GENERATIONS = 64
MAX_FAILURE_EVENTS = 256
"""Events of failed workers that are kept of a generation while a job runs: its verdict tells of all."""
UNKNOWN, WHOLE_JOB = "unknown", "job"
STOPPED, JOINED, FINISHED, OPEN = "stopped", "joined", "finished", "open"
INCIDENT_KINDS = (*failure_classification.FAILURE_KINDS, WHOLE_JOB, UNKNOWN)
"""Ends that are failures."""
RECOVERY_BUCKETS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Of the histogram of recoveries, the last one open: from a warm restart to a large state sent anew."""
NODES_JOINED_REASON = "newcomers are here"
"""Why a leader ends a world that nothing befell (`rendezvous.leading`)."""
_RESTART_PATTERN = re.compile(r"generation (\d{1,16}) is over: (.*)", re.DOTALL)
_WORKER_EVENT_KINDS = frozenset({"failure", "worker-exit", "hang", "hang-ended"})
_LOST, _STILL_RUNNING, _SIGNALLED, _FAILED, _DONE = "lost", "stays", "signalled", "failed", "done"
_STATUS_BY_OUTCOME = {"signalled": _SIGNALLED, "left": _SIGNALLED, "failed": _FAILED, "done": _DONE}


@dataclass(frozen=True, slots=True)
class GenerationEnd:
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
    other_failures: tuple[str, ...] = ()
    secondary_failures: tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        """Whether this end counts as an incident."""
        return self.kind in INCIDENT_KINDS


@dataclass(frozen=True, slots=True)
class Incident:
    """A failure that ended a generation, and its cost. Times are Unix seconds, spans are seconds."""

    generation: int
    kind: str
    cause: str
    t: float | None
    recomputed_steps: int | None = None
    recovery_s: float | None = None
    """From the first sign to the first step of the next generation; None while that is to come."""
    node: str = ""
    rank: int | None = None


@dataclass(slots=True)
class IncidentTotals:
    """Over all incidents. ``recoveries``: a count for each of `BOUNDS_S`, and one for what took longer."""

    incidents: Counter[str] = field(default_factory=Counter)
    recomputed_steps: int = 0
    recovery_buckets: list[int] = field(default_factory=lambda: [0] * (len(RECOVERY_BUCKETS_S) + 1))
    recovery_s: float = 0.0

    def add(self, incident: Incident) -> None:
        """Count one more."""
        self.incidents[incident.kind] += 1
        self.recomputed_steps += incident.recomputed_steps or 0
        if incident.recovery_s is not None:
            place = sum(incident.recovery_s > bound for bound in RECOVERY_BUCKETS_S)
            self.recovery_buckets[place] += 1
            self.recovery_s += incident.recovery_s


class _AgentStatus(NamedTuple):
    """What became of a node's agent at the end of a generation: lost, stays, signalled, failed or done."""

    kind: str
    t: float | None
    text: str = ""


@dataclass(slots=True)
class _NodePosition:
    """The generation of a node: when it heard of that, when its workers last wrote, its agent's process."""

    generation: int
    since_t: float
    last_event_t: float
    pid: int | None  # None: not told


@dataclass(slots=True)
class GenerationState:
    """What is known of one generation.

    ``named`` are its nodes as its resume lists them, ``nodes`` those that were heard of, ``size`` how many
    there are. ``lost_steps`` are of the generation before, as its ranks noted their steps: a power cut may
    have taken some notes. ``outlived``: an agent of it was in the next one, to which it would have told a
    failure. ``changes`` counts what was taken in.
    """

    start_t: float | None = None
    listed_nodes: tuple[str, ...] = ()
    observed_nodes: set[str] = field(default_factory=set)
    num_nodes: int = 0
    start_step: int | None = None
    recomputed_steps: int | None = None
    first_step_t: float | None = None
    last_step: int | None = None
    last_step_t: float | None = None
    last_event_t: float | None = None
    finished_ranks: set[int | None] = field(default_factory=set)
    finished_nodes: set[str] = field(default_factory=set)
    events: dict[str, list[Event]] = field(default_factory=dict)
    num_failure_events: int = 0
    workers_stopped_t: float | None = None
    detected_t: float | None = None
    restart_reason: str = ""
    root_causes: tuple[Failure, ...] = ()
    secondary_failures: tuple[Failure, ...] = ()
    agent_statuses: dict[str, _AgentStatus] = field(default_factory=dict)
    has_surviving_agent: bool = False
    revision: int = 0

    @property
    def members(self) -> frozenset[str]:
        """Its nodes, as far as they are known."""
        return frozenset(self.listed_nodes or self.observed_nodes)

    @property
    def knows_all_members(self) -> bool:
        """Whether `members` are all."""
        return bool(self.listed_nodes) or len(self.observed_nodes) >= self.num_nodes


class IncidentTracker:
    """The incidents of one job, as far as one node hears of them."""

    def __init__(
        self, max_generations: int = MAX_GENERATIONS, max_failure_events: int = MAX_FAILURE_EVENTS
    ) -> None:
        """``kept``: how many generations are remembered; ``most_failures``: events of each one's failures."""
        self._max_generations = max_generations
        self._max_failure_events = max_failure_events
        self._generations: dict[int, GenerationState] = {}
        self._node_positions: dict[str, _NodePosition] = {}  # by node
        self._agent_pids: dict[str, int | None] = {}  # process of each node's agent
        self._evicted_totals = IncidentTotals()
        self._boot_times: dict[str, float] = {}  # when each boot was, by the first that was heard of it
        self._cached_incidents: dict[int, tuple[tuple[int, ...], Incident | None]] = {}

    def record(self, event: Event, max_generation: int = MAX_COUNT_VALUE) -> None:
        """Take in one event; one of a kind or form that says nothing here changes nothing.

        ``newest``: no generation beyond it can have begun. One that a broken node made up would have those
        forgotten that have.
        """
        t, since = get_seconds(event), get_boot_time(event)
        if t is not None and since is not None:  # a wall clock may jump
            t = since[1] + self._boot_times.setdefault(since[0], t - since[1])
        if t is not None and (get_count(event, "generation") or 0) <= max_generation:
            self.record_at(event, t, max_generation)

    def record_at(self, event: Event, t: float, max_generation: int = MAX_COUNT_VALUE) -> None:
        """Take in an event that happened at ``t``, a time that is comparable with the others'."""
        kind, node = event.get("event"), str(event.get("node", ""))
        generation = get_count(event, "generation") or None
        if kind == "round":
            self._record_round(event, node, generation, t)
        elif kind == "agent-start":
            self._record_agent_start(event, node, t)
        elif kind == "agent-end":
            self._record_agent_end(event, node, t)
        elif kind == "rendezvous":
            self._record_rendezvous(event, node, t, max_generation)
        elif kind in _WORKER_EVENT_KINDS:
            self._record_worker_event(event, node, generation, t)
        elif generation is None:
            return
        elif kind == "resume":
            _record_resume(self._get_or_create_state(generation), event, t)
        elif kind == "worker-start":
            self._record_membership(node, generation, t)
            turn = self._get_or_create_state(generation)
            if turn.start_step is None:
                turn.start_step = get_count(event, "step")
        elif kind == "verdict":
            turn = self._get_or_create_state(generation)
            turn.root_causes = turn.root_causes or _parse_failures(event.get("causes"))
            turn.secondary_failures = turn.secondary_failures or _parse_failures(event.get("cascade"))
        elif kind in {"step", "commit", "run-end"}:
            self._record_step(event, node, generation, t)

    # ---- events of workers ---------------------------------------------------------------------------

    def _record_step(self, event: Event, node: str, generation: int, t: float) -> None:
        turn, step = self._get_or_create_state(generation), get_count(event, "step")
        if step is not None:
            turn.last_step = max(step, turn.last_step or 0)
        if event["event"] == "commit":  # whose process may outlive the generation
            return
        turn.last_event_t = max(t, turn.last_event_t or t)
        if event["event"] == "step":
            turn.first_step_t = min(t, turn.first_step_t or t)
            turn.last_step_t = max(t, turn.last_step_t or t)
        else:
            turn.finished_ranks.add(get_count(event, "rank"))
            turn.finished_nodes.add(node)
        place = self._node_positions.get(node)
        if place and place.generation == generation:
            place.last_event_t = max(place.last_event_t, t)

    def _record_worker_event(self, event: Event, node: str, generation: int | None, t: float) -> None:
        place = self._node_positions.get(node)
        if generation is None:
            if place is None or t < place.since_t:  # one of an earlier generation may be told again
                return
            generation = place.generation
        turn = self._get_or_create_state(generation)
        turn.last_event_t = max(t, turn.last_event_t or t)
        if place and place.generation == generation and event["event"] != "worker-exit":
            place.last_event_t = max(place.last_event_t, t)
        if event["event"] == "worker-exit":
            if event.get("stopped"):
                turn.workers_stopped_t = min(t, turn.workers_stopped_t or t)
            failed = (event.get("exit_code") or event.get("signal")) and not event.get("stopped")
            # A stub whose agent died has stopped its worker by SIGKILL, which tells when that was.
            if not (failed or event.get("stuck") or event.get("signal") == "SIGKILL"):
                return
        elif event["event"] == "hang":
            turn.detected_t = min(t, turn.detected_t or t)
        if turn.num_failure_events < self._max_failure_events:
            turn.num_failure_events += 1
            turn.events.setdefault(node, []).append({**event, "t": t, "traceback": None})

    # ---- events of agents ----------------------------------------------------------------------------

    def _record_round(self, event: Event, node: str, generation: int | None, t: float) -> None:
        place, pid = self._node_positions.get(node), get_count(event, "pid") or None
        before = place.pid if place else None
        self._agent_pids[node] = pid
        if place and pid and before and t >= place.since_t and generation != place.generation:
            turn = self._get_or_create_state(place.generation)
            if pid != before:
                turn.agent_statuses.setdefault(node, _AgentStatus(_LOST, place.last_event_t))
            elif generation is None or generation > place.generation:
                turn.agent_statuses.setdefault(node, _AgentStatus(_STILL_RUNNING, t))
                turn.has_surviving_agent |= generation is not None
        if generation:
            self._record_membership(node, generation, t)
            turn = self._get_or_create_state(generation)
            turn.num_nodes = max(turn.num_nodes, get_count(event, "num_nodes") or 0)

    def _record_membership(self, node: str, generation: int, t: float) -> None:
        """A node takes part in a generation."""
        turn, place = self._get_or_create_state(generation), self._node_positions.get(node)
        turn.start_t = min(t, turn.start_t or t)
        turn.observed_nodes.add(node)
        if place is None or place.generation != generation:
            if place is None or t >= place.since_t:
                self._node_positions[node] = _NodePosition(generation, t, t, self._agent_pids.get(node))
        else:
            place.last_event_t = max(place.last_event_t, t)

    def _record_agent_start(self, event: Event, node: str, t: float) -> None:
        place = self._node_positions.get(node)
        self._agent_pids[node] = get_count(event, "pid") or None
        if place and t >= place.since_t:
            self._get_or_create_state(place.generation).agent_statuses.setdefault(
                node, _AgentStatus(_LOST, place.last_event_t)
            )
        begun = (n for n, turn in self._generations.items() if turn.start_t is not None and turn.start_t < t)
        newest = max(begun, default=0)
        if (
            newest
            and node in self._generations[newest].listed_nodes
            and (not place or place.generation < newest)
        ):
            self._get_or_create_state(newest).agent_statuses.setdefault(
                node, _AgentStatus(_LOST, None)
            )  # its log was lost with its disk

    def _record_agent_end(self, event: Event, node: str, t: float) -> None:
        place, how = self._node_positions.get(node), _STATUS_BY_OUTCOME.get(str(event.get("outcome")))
        if place and how and t >= place.since_t:
            text = event.get("message")
            said = text.removeprefix(f"node {node} leaves the job: ") if isinstance(text, str) else ""
            self._get_or_create_state(place.generation).agent_statuses.setdefault(
                node, _AgentStatus(how, t, said)
            )

    def _record_rendezvous(self, event: Event, node: str, t: float, newest: int) -> None:
        place, what = self._node_positions.get(node), event.get("what")
        told = _RESTART_PATTERN.fullmatch(str(event.get("message", ""))) if what == "restart" else None
        if told and 0 < int(told[1]) <= newest:
            turn = self._get_or_create_state(int(told[1]))
            turn.restart_reason = told[2]
            turn.detected_t = min(t, turn.detected_t or t)
        elif what == "leader-lost" and place and t >= place.since_t:
            turn = self._get_or_create_state(place.generation)
            turn.detected_t = min(t, turn.detected_t or t)

    # ---- what is told --------------------------------------------------------------------------------

    def generation_state(self, number: int) -> GenerationState:
        """Give what is known of a generation."""
        return self._generations.get(number, GenerationState())

    def incidents(self) -> list[Incident]:
        """Give those that are remembered, in order."""
        known = sorted(number for number, turn in self._generations.items() if turn.start_t is not None)
        found = [self._judge_incident(number, following) for number, following in pairwise(known)]
        return [one for one in found if one is not None]

    def _judge_incident(self, number: int, following: int) -> Incident | None:
        """The failure that ended a generation; made anew when more is known."""
        turn, later = self._generations[number], self._generations[following]
        known = (turn.revision, following, later.revision)
        if number not in self._cached_incidents or self._cached_incidents[number][0] != known:
            end, t, lost, recovered = analyze_end(turn, later)
            one = Incident(number, end.kind, end.text, t, lost, recovered, end.node, end.rank)
            self._cached_incidents[number] = (known, one if end.is_failure else None)
        return self._cached_incidents[number][1]

    def totals(self) -> IncidentTotals:
        """Sum up all incidents, those that are forgotten too."""
        before = self._evicted_totals
        sums = IncidentTotals(
            Counter(before.incidents),
            before.recomputed_steps,
            list(before.recovery_buckets),
            before.recovery_s,
        )
        for incident in self.incidents():
            sums.add(incident)
        return sums

    def _get_or_create_state(self, number: int) -> GenerationState:
        """The turn of that number; of one that is older than all that are remembered none that counts."""
        if number not in self._generations:
            if len(self._generations) >= self._max_generations:
                if number < min(self._generations):
                    return GenerationState()
                self._evict_oldest()
            self._generations[number] = GenerationState()
        turn = self._generations[number]
        turn.revision += 1
        return turn

    def _evict_oldest(self) -> None:
        """Sum the oldest up. Whatever is still told of it is too late."""
        oldest = min(self._generations)
        following = min(
            (n for n, turn in self._generations.items() if turn.start_t is not None and n > oldest),
            default=None,
        )
        if following is not None and self._generations[oldest].start_t is not None:
            incident = self._judge_incident(oldest, following)
            if incident is not None:
                self._evicted_totals.add(incident)
        del self._generations[oldest]
        self._cached_incidents.pop(oldest, None)


def track_incidents(events: Iterable[tuple[float, Event]]) -> IncidentTracker:
    """Make a tally of all events of a run, each with its time, in order; it forgets none."""
    tally = IncidentTracker(MAX_COUNT_VALUE, MAX_COUNT_VALUE)
    for t, event in events:
        tally.record_at(event, t)
    return tally


def _record_resume(state: GenerationState, event: Event, t: float) -> None:
    named, lost = event.get("nodes"), get_count(event, "recomputed_steps")
    state.start_t = min(t, state.start_t or t)
    if isinstance(named, list):
        state.listed_nodes = tuple(name for name in named if isinstance(name, str)) or state.listed_nodes
    state.recomputed_steps = (
        lost if state.recomputed_steps is None else max(lost or 0, state.recomputed_steps)
    )
    step = get_count(event, "step")
    state.start_step = state.start_step if step is None else step


# ---- the cause -----------------------------------------------------------------------------------------

_DEFINITE, _UNREACHABLE, _SECONDARY = 0, 1, 2
_FailureSigns = list[tuple[float | None, Failure]]


class EndAnalysis(NamedTuple):
    """Why a generation ended, when that was first seen, and what it cost; see `Incident`."""

    end: GenerationEnd
    t: float | None
    recomputed_steps: int | None
    recovery_s: float | None


def analyze_end(state: GenerationState, next_state: GenerationState | None) -> EndAnalysis:
    """Judge the end of a generation; ``following`` is the next one, None while there is none."""
    fates = _complete_statuses(state, next_state)
    signs = _collect_signs(state, fates)
    end = _determine_end(state, next_state, fates, signs)
    seen = [t for t in (*(t for t, _ in signs), state.detected_t) if t is not None]
    noticed = min(seen, default=state.workers_stopped_t)
    if next_state is None:
        return EndAnalysis(end, noticed, None, None)
    told = [] if next_state.recomputed_steps is None else [next_state.recomputed_steps]
    if next_state.start_step is not None and state.last_step is not None:
        told.append(max(0, state.last_step - next_state.start_step))
    recovered_s = None
    first = noticed if noticed is not None else state.last_event_t
    if end.kind != FINISHED and first is not None and next_state.first_step_t is not None:
        recovered_s = round(max(0.0, next_state.first_step_t - first), 3)
    return EndAnalysis(end, noticed, max(told, default=None), recovered_s)


def _determine_end(
    state: GenerationState,
    next_state: GenerationState | None,
    fates: Mapping[str, _AgentStatus],
    signs: _FailureSigns,
) -> GenerationEnd:
    causes, cascade = _split_root_causes(state, signs)
    own = [one for one in causes if state.root_causes or not one[1].is_secondary]
    if _is_finished(state, fates, own):
        return GenerationEnd(FINISHED, "finished")
    gone = _whole_job_end(state, next_state, fates, own, signs)
    if gone is not None:
        return gone
    if own:
        return _failure_end(causes, cascade)
    joined = sorted(next_state.members - state.members) if next_state and state.knows_all_members else []
    told = tuple(_describe(one) for _, one in signs)
    if joined and next_state and next_state.listed_nodes:
        # Agents stop their workers one after the other: an echo is all that a join leaves.
        return GenerationEnd(JOINED, f"{_format_nodes(joined)} joined", secondary_failures=told)
    if state.restart_reason == NODES_JOINED_REASON or (
        state.has_surviving_agent and not state.restart_reason
    ):
        return GenerationEnd(JOINED, "nodes came that left again", secondary_failures=told)
    if causes:
        return _failure_end(causes, cascade)
    if next_state is not None:
        return GenerationEnd(UNKNOWN, state.restart_reason or "ended without a record of why")
    failed = [fate for fate in fates.values() if fate.kind == _FAILED]
    if failed:
        return GenerationEnd(UNKNOWN, failed[0].text or "the agents gave up", t=failed[0].t)
    return GenerationEnd(OPEN, "still running, or killed as a whole")


def _complete_statuses(state: GenerationState, next_state: GenerationState | None) -> dict[str, _AgentStatus]:
    """What became of each node. A silent one is lost if the others went on, or gave up, without it."""
    fates = dict(state.agent_statuses)
    gave_up = next_state is None and any(fate.kind == _FAILED for fate in fates.values())
    missing = (
        state.members - next_state.members
        if next_state is not None and next_state.knows_all_members
        else set()
    )
    for node in sorted(state.members if gave_up else missing):
        fates.setdefault(node, _AgentStatus(_LOST, None))
    return fates


def _collect_signs(state: GenerationState, fates: Mapping[str, _AgentStatus]) -> _FailureSigns:
    """Every failure that the events show, the likeliest cause first."""
    dated: set[str] = set()
    found: list[tuple[int, float, float | None, Failure]] = []
    for node, events in state.events.items():
        is_lost = node in fates and fates[node].kind == _LOST
        kills = [one for one in events if one["event"] == "worker-exit" and one.get("signal") == "SIGKILL"]
        told = [one for one in events if not (is_lost and one in kills)]
        for t, failure in failure_classification.classify_with_times(told, node):
            found.append((_SECONDARY if failure.is_secondary else _DEFINITE, t, t, failure))
        if is_lost and kills:  # a worker's stub sees its agent die: it alone can tell the moment
            killed_t = kills[0]["t"]
            found.append(
                (_DEFINITE, killed_t, killed_t, failure_classification.make_node_failure(node, "was lost"))
            )
            dated.add(node)
    for node, fate in fates.items():
        if fate.kind == _LOST and node not in dated:
            # Nobody steps without it, so it lived when the others did that last.
            alive = max((t for t in (state.last_step_t, fate.t) if t is not None), default=None)
            order = float("inf") if alive is None else alive
            found.append(
                (_UNREACHABLE, order, alive, failure_classification.make_node_failure(node, "was lost"))
            )
        elif fate.kind == _SIGNALLED:
            text = f"left: {fate.text or 'stopped by a signal.'}"
            found.append(
                (
                    _DEFINITE,
                    fate.t or 0.0,
                    fate.t,
                    failure_classification.make_node_failure(node, text, announced=True),
                )
            )
    found.sort(key=lambda one: (not one[3].is_deterministic, *one[:2]))
    return [(t, failure) for _, _, t, failure in found]


def _split_root_causes(state: GenerationState, signs: _FailureSigns) -> tuple[_FailureSigns, _FailureSigns]:
    """Causes and what followed from them; the agents' verdict goes before what events show.

    A cause whose own log is lost has left no sign but the verdict.
    """
    if not state.root_causes:
        own = [one for one in signs if not one[1].is_secondary] or signs[:1]
        return own, [one for one in signs if one not in own]
    left = list(signs)
    causes: _FailureSigns = []
    for cause in state.root_causes:
        sign = next((one for one in left if _is_same_failure(one[1], cause)), None)
        if sign:
            left.remove(sign)
        says_why = sign is not None and sign[1].kind == failure_classification.PREEMPTED  # the node itself
        causes.append(sign if sign and says_why else (sign[0] if sign else None, cause))
    cascade: _FailureSigns = [(None, one) for one in state.secondary_failures]
    for one in left:
        if not any(_is_same_failure(one[1], other) for other in state.secondary_failures):
            (cascade if one[1].is_secondary else causes).append(one)
    return causes, cascade


def _is_same_failure(one: Failure, other: Failure) -> bool:
    of_node = other.kind in failure_classification.NODE_FAILURE_KINDS
    same = (one.kind in failure_classification.NODE_FAILURE_KINDS) if of_node else one.rank == other.rank
    return one.node == other.node and same


def _is_finished(state: GenerationState, fates: Mapping[str, _AgentStatus], own: _FailureSigns) -> bool:
    """Whether its work was done. What failed after that ended nothing."""
    if not state.finished_ranks and not any(fate.kind == _DONE for fate in fates.values()):
        return False
    for _, one in own:
        if one.kind not in failure_classification.NODE_FAILURE_KINDS:
            if one.rank not in state.finished_ranks:
                return False
        elif one.node not in state.finished_nodes and (
            one.node in state.observed_nodes or not state.finished_ranks
        ):
            return False
    return True


def _whole_job_end(
    state: GenerationState,
    next_state: GenerationState | None,
    fates: Mapping[str, _AgentStatus],
    own: _FailureSigns,
    signs: _FailureSigns,
) -> GenerationEnd | None:
    """Every node was told to stop, or died without a word: nobody was left to go on."""
    hows = {fate.kind for fate in fates.values()}
    if (
        not hows
        or hows - {_LOST, _SIGNALLED}
        or any(one.kind not in failure_classification.NODE_FAILURE_KINDS for _, one in own)
    ):
        return None
    is_known = state.knows_all_members and state.members <= fates.keys()
    if not is_known and (_SIGNALLED not in hows or next_state is None or state.root_causes):
        return None
    first = min((t for t, _ in signs if t is not None), default=None)
    cascade = tuple(_describe(one) for _, one in signs if one.is_secondary)
    if _SIGNALLED in hows:
        words = sorted({fate.text for fate in fates.values() if fate.kind == _SIGNALLED and fate.text})
        return GenerationEnd(
            STOPPED, words[0].rstrip(".") if words else "stopped", t=first, secondary_failures=cascade
        )
    return GenerationEnd(WHOLE_JOB, "whole job killed", t=first, secondary_failures=cascade)


def _failure_end(causes: _FailureSigns, cascade: _FailureSigns) -> GenerationEnd:
    (t, root), *others = causes
    also = tuple(_describe(one) for _, one in others)
    return GenerationEnd(
        root.kind, _describe(root), t, root.node, root.rank, also, tuple(_describe(one) for _, one in cascade)
    )


def _describe(failure: Failure) -> str:
    return describe_failure(failure, with_node=True)


def _format_nodes(names: Sequence[str]) -> str:
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return ("nodes " if len(names) > 1 else "node ") + listed


def _parse_failures(listed: Any) -> tuple[Failure, ...]:
    """The failures in a list of a verdict, as `agent.witness` wrote it."""
    return tuple(
        Failure(
            **{
                name: str(one.get(name) or "")[: failure_classification.MAX_TEXT_CHARS]
                for name in _TEXT_FIELDS
            },  # type: ignore[arg-type]
            rank=get_count(one, "rank"),
            step=get_count(one, "step"),
            nodes=get_count(one, "nodes") or 1,
        )
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, Mapping) and one.get("kind") in failure_classification.FAILURE_KINDS
    )


_TEXT_FIELDS = tuple(one.name for one in fields(Failure) if one.type == "str")
