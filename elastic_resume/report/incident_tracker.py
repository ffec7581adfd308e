"""Derive why each generation of a job ended, and what its end cost. Pure.

`IncidentTracker` folds events into one `GenerationState` for each generation. `analyze_end` compares it
with the next generation's state and names the root cause. Sources in order of preference:

1. The agents' verdict. It uses the order in which the leader received failures, not clocks.
2. The failures in the events. A death or an exception without another explanation comes before a
   node that became silent, and both come before secondary failures.
3. The reason that the leader gave for the restart.

Exits of workers that their agent stopped are no failures. A live status records one event at a time, in
any order, and keeps the newest `MAX_GENERATIONS` generations; its totals include those that it dropped. A
report records all events at once, in order (`track_incidents`). A start with ``--resume never`` begins a new
run: earlier generations are dropped, from the totals too.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, NamedTuple

from elastic_resume.events import MAX_COUNT_VALUE, Event, get_boot_time, get_count, get_seconds
from elastic_resume.policy.failure_classification import (
    FAILURE_KINDS,
    MAX_TEXT_CHARS,
    NODE_FAILURE_KINDS,
    NODE_LOST,
    PREEMPTED,
    Failure,
    classify_with_times,
)
from elastic_resume.policy.wording import describe_failure

MAX_GENERATIONS = 64
MAX_FAILURE_EVENTS = 256
"""Events of failed workers kept for each generation while a job runs; its verdict names all of them."""
UNKNOWN, WHOLE_JOB = "unknown", "job"
STOPPED, JOINED, FINISHED, OPEN = "stopped", "joined", "finished", "open"
INCIDENT_KINDS = (*FAILURE_KINDS, WHOLE_JOB, UNKNOWN)
"""Kinds of ends that are failures."""
RECOVERY_BUCKETS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histogram of recoveries; a last bucket without a bound follows."""
NODES_JOINED_REASON = "newcomers are here"
"""The reason in a leader's restart message if no failure ended the generation."""
_RESTART_PATTERN = re.compile(r"generation (\d{1,16}) is over: (.*)", re.DOTALL)
_WORKER_EVENT_KINDS = frozenset({"failure", "worker-exit", "hang", "hang-ended"})
_TEXT_FIELDS = tuple(member.name for member in fields(Failure) if member.type == "str")
_LOST, _STILL_RUNNING, _SIGNALLED, _FAILED, _DONE = "lost", "stays", "signalled", "failed", "done"
_STATUS_BY_OUTCOME = {"signalled": _SIGNALLED, "left": _SIGNALLED, "failed": _FAILED, "done": _DONE}


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """Why a generation ended.

    ``kind`` is one of `INCIDENT_KINDS` for a failure. Else it is stopped (the whole job was stopped on
    request), joined (nodes joined), finished, or open (it runs, or was killed as a whole). ``node`` and
    ``rank`` name the root cause. ``t`` is None if the root cause left no time.
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
    """A failure that ended a generation, and its cost. Times are Unix seconds."""

    generation: int
    kind: str
    cause: str
    t: float | None
    recomputed_steps: int | None = None
    recovery_s: float | None = None
    """From the first sign to the first step of the next generation; None before that step."""
    node: str = ""
    rank: int | None = None


@dataclass(slots=True)
class IncidentTotals:
    """Sums over all incidents.

    ``recovery_buckets`` counts recoveries for each bound of `RECOVERY_BUCKETS_S`, then those that took
    longer.
    """

    incidents: Counter[str] = field(default_factory=Counter)
    recomputed_steps: int = 0
    recovery_buckets: list[int] = field(default_factory=lambda: [0] * (len(RECOVERY_BUCKETS_S) + 1))
    recovery_s: float = 0.0

    def add(self, incident: Incident) -> None:
        """Add one incident."""
        self.incidents[incident.kind] += 1
        self.recomputed_steps += incident.recomputed_steps or 0
        if incident.recovery_s is not None:
            bucket = sum(incident.recovery_s > bound for bound in RECOVERY_BUCKETS_S)
            self.recovery_buckets[bucket] += 1
            self.recovery_s += incident.recovery_s


class _AgentStatus(NamedTuple):
    """How a node's agent left a generation: lost, stays, signalled, failed or done."""

    kind: str
    t: float | None
    text: str = ""


@dataclass(slots=True)
class _NodePosition:
    """The generation that a node is in."""

    generation: int
    since_t: float
    last_event_t: float
    pid: int | None  # pid of its agent; None: unknown


@dataclass(slots=True)
class GenerationState:
    """What the events say of one generation.

    ``listed_nodes`` are the nodes in its resume event, ``observed_nodes`` those that wrote events of it.
    ``recomputed_steps`` are steps of the *previous* generation. ``has_surviving_agent``: an agent of it
    reached the next generation, so it would have reported a failure. ``revision`` counts changes.
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
        """Whether `members` is complete."""
        return bool(self.listed_nodes) or len(self.observed_nodes) >= self.num_nodes


class IncidentTracker:
    """Tracks the incidents of one job from events, with bounded memory."""

    def __init__(
        self, max_generations: int = MAX_GENERATIONS, max_failure_events: int = MAX_FAILURE_EVENTS
    ) -> None:
        """Keep ``max_generations`` generations, and ``max_failure_events`` events of failures for each."""
        self._max_generations = max_generations
        self._max_failure_events = max_failure_events
        self._generations: dict[int, GenerationState] = {}
        self._node_positions: dict[str, _NodePosition] = {}
        self._agent_pids: dict[str, int | None] = {}
        self._evicted_totals = IncidentTotals()
        self._min_generation = 0  # this and older generations belong to an earlier training
        self._boot_times: dict[str, float] = {}  # Unix time of each boot, by its first event
        self._cached_incidents: dict[int, tuple[tuple[int, ...], Incident | None]] = {}

    def record(self, event: Event) -> None:
        """Record one event; ignore an event whose kind or form is unknown."""
        t, since = get_seconds(event), get_boot_time(event)
        if t is not None and since is not None:  # a wall clock may jump
            t = since[1] + self._boot_times.setdefault(since[0], t - since[1])
        if t is not None:
            self.record_at(event, t)

    def record_at(self, event: Event, t: float) -> None:
        """Record an event that happened at ``t``, a time comparable with the other events' times."""
        kind, node = event.get("event"), str(event.get("node", ""))
        generation = get_count(event, "generation") or None
        if kind == "agent-start":
            self._record_agent_start(event, node, t)
        elif kind == "agent-end":
            self._record_agent_end(event, node, t)
        elif kind == "rendezvous":
            self._record_rendezvous(event, node, t)
        elif kind in _WORKER_EVENT_KINDS:
            self._record_worker_event(event, node, generation, t)
        elif generation is None:
            return
        elif kind == "round":
            self._record_round(event, node, generation, t)
        elif kind == "worker-start":
            self._forget_earlier_training(get_count(event, "min_generation") or 0, generation)
            self._record_membership(node, generation, t)
            state = self._get_or_create_state(generation)
            if state.start_step is None:
                state.start_step = get_count(event, "step")
        elif kind == "resume":
            _record_resume(self._get_or_create_state(generation), event, t)
        elif kind == "verdict":
            state = self._get_or_create_state(generation)
            state.root_causes = state.root_causes or _parse_failures(event.get("root_causes"))
            state.secondary_failures = state.secondary_failures or _parse_failures(
                event.get("secondary_failures")
            )
        elif kind in {"step", "commit", "run-end"}:
            self._record_step(event, node, generation, t)

    # ---- events of workers ---------------------------------------------------------------------------

    def _record_step(self, event: Event, node: str, generation: int, t: float) -> None:
        state, step = self._get_or_create_state(generation), get_count(event, "step")
        if step is not None:
            state.last_step = max(step, state.last_step or 0)
        if event["event"] == "commit":  # the committer may outlive the generation
            return
        state.last_event_t = max(t, state.last_event_t or t)
        if event["event"] == "step":
            state.first_step_t = min(t, state.first_step_t or t)
            state.last_step_t = max(t, state.last_step_t or t)
        else:
            state.finished_ranks.add(get_count(event, "rank"))
            state.finished_nodes.add(node)
        position = self._node_positions.get(node)
        if position and position.generation == generation:
            position.last_event_t = max(position.last_event_t, t)

    def _record_worker_event(self, event: Event, node: str, generation: int | None, t: float) -> None:
        position = self._node_positions.get(node)
        if generation is None:
            if position is None or t < position.since_t:  # an old event may arrive again
                return
            generation = position.generation
        state = self._get_or_create_state(generation)
        state.last_event_t = max(t, state.last_event_t or t)
        if position and position.generation == generation and event["event"] != "worker-exit":
            position.last_event_t = max(position.last_event_t, t)
        if event["event"] == "worker-exit":
            if event.get("stopped"):
                state.workers_stopped_t = min(t, state.workers_stopped_t or t)
            failed = (event.get("exit_code") or event.get("signal")) and not event.get("stopped")
            # A launcher shim whose agent died kills its worker with SIGKILL; that dates the agent's death.
            if not (failed or event.get("stuck") or event.get("signal") == "SIGKILL"):
                return
        elif event["event"] == "hang":
            state.detected_t = min(t, state.detected_t or t)
        if state.num_failure_events < self._max_failure_events:
            state.num_failure_events += 1
            state.events.setdefault(node, []).append({**event, "t": t, "traceback": None})

    # ---- events of agents ----------------------------------------------------------------------------

    def _record_round(self, event: Event, node: str, generation: int, t: float) -> None:
        position, pid = self._node_positions.get(node), get_count(event, "pid") or None
        old_pid = position.pid if position else None
        self._agent_pids[node] = pid
        if position and pid and old_pid and t >= position.since_t and generation != position.generation:
            state = self._get_or_create_state(position.generation)
            if pid != old_pid:
                state.agent_statuses.setdefault(node, _AgentStatus(_LOST, position.last_event_t))
            elif generation > position.generation:
                state.agent_statuses.setdefault(node, _AgentStatus(_STILL_RUNNING, t))
                state.has_surviving_agent = True
        self._record_membership(node, generation, t)
        state = self._get_or_create_state(generation)
        state.num_nodes = max(state.num_nodes, get_count(event, "num_nodes") or 0)

    def _record_membership(self, node: str, generation: int, t: float) -> None:
        """Record that a node takes part in a generation."""
        state, position = self._get_or_create_state(generation), self._node_positions.get(node)
        state.start_t = min(t, state.start_t or t)
        state.observed_nodes.add(node)
        if position is None or position.generation != generation:
            if position is None or t >= position.since_t:
                self._node_positions[node] = _NodePosition(generation, t, t, self._agent_pids.get(node))
        else:
            position.last_event_t = max(position.last_event_t, t)

    def _record_agent_start(self, event: Event, node: str, t: float) -> None:
        position = self._node_positions.get(node)
        self._agent_pids[node] = get_count(event, "pid") or None
        if position and t >= position.since_t:
            self._get_or_create_state(position.generation).agent_statuses.setdefault(
                node, _AgentStatus(_LOST, position.last_event_t)
            )
        newest = max((n for n in self._started() if (self._generations[n].start_t or 0.0) < t), default=0)
        if position and position.generation >= newest:
            return
        if newest and node in self._generations[newest].listed_nodes:  # its log was lost with its disk
            self._get_or_create_state(newest).agent_statuses.setdefault(node, _AgentStatus(_LOST, None))

    def _record_agent_end(self, event: Event, node: str, t: float) -> None:
        position = self._node_positions.get(node)
        status_kind = _STATUS_BY_OUTCOME.get(str(event.get("outcome")))
        if position and status_kind and t >= position.since_t:
            text = event.get("message")
            reason = text.removeprefix(f"node {node} leaves the job: ") if isinstance(text, str) else ""
            self._get_or_create_state(position.generation).agent_statuses.setdefault(
                node, _AgentStatus(status_kind, t, reason)
            )

    def _record_rendezvous(self, event: Event, node: str, t: float) -> None:
        position, what = self._node_positions.get(node), event.get("what")
        restart = _RESTART_PATTERN.fullmatch(str(event.get("message", ""))) if what == "restart" else None
        if restart and int(restart[1]):
            state = self._get_or_create_state(int(restart[1]))
            state.restart_reason = restart[2]
            state.detected_t = min(t, state.detected_t or t)
        elif what == "leader-lost" and position and t >= position.since_t:
            state = self._get_or_create_state(position.generation)
            state.detected_t = min(t, state.detected_t or t)

    # ---- results -------------------------------------------------------------------------------------

    def generation_state(self, number: int) -> GenerationState:
        """Return what is known of a generation."""
        return self._generations.get(number, GenerationState())

    def incidents(self) -> list[Incident]:
        """Return the remembered incidents, in order."""
        found = [
            self._judge_incident(number, next_number) for number, next_number in pairwise(self._started())
        ]
        return [incident for incident in found if incident is not None]

    def _started(self) -> list[int]:
        """Return the numbers of the generations whose start is known, in order."""
        return sorted(number for number, state in self._generations.items() if state.start_t is not None)

    def _judge_incident(self, number: int, next_number: int) -> Incident | None:
        """Return the failure that ended a generation, or None; cached until either state changes."""
        state, next_state = self._generations[number], self._generations[next_number]
        revisions = (state.revision, next_number, next_state.revision)
        if number not in self._cached_incidents or self._cached_incidents[number][0] != revisions:
            end, t, recomputed, recovery_s = analyze_end(state, next_state)
            incident = Incident(number, end.kind, end.text, t, recomputed, recovery_s, end.node, end.rank)
            self._cached_incidents[number] = (revisions, incident if end.is_failure else None)
        return self._cached_incidents[number][1]

    def totals(self) -> IncidentTotals:
        """Return the sums over all incidents, including those of dropped generations."""
        totals = copy.deepcopy(self._evicted_totals)
        for incident in self.incidents():
            totals.add(incident)
        return totals

    def _get_or_create_state(self, number: int) -> GenerationState:
        """Return a generation's state; a detached one for a generation that is not kept any more."""
        if number not in self._generations:
            if number <= self._min_generation:
                return GenerationState()
            if len(self._generations) >= self._max_generations:
                if number < min(self._generations):
                    return GenerationState()
                self._evict_oldest()
            self._generations[number] = GenerationState()
        state = self._generations[number]
        state.revision += 1
        return state

    def _forget_earlier_training(self, newest: int, generation: int) -> None:
        """Drop the generations up to ``newest``: a start with ``--resume never`` began a new run."""
        if not self._min_generation < newest < generation:
            return
        self._min_generation, self._evicted_totals = newest, IncidentTotals()
        for number in [number for number in self._generations if number <= newest]:
            del self._generations[number]
            self._cached_incidents.pop(number, None)

    def _evict_oldest(self) -> None:
        """Add the oldest generation to the totals and drop it. Later events of it are ignored."""
        oldest = min(self._generations)
        started = self._started()
        if len(started) > 1 and started[0] == oldest:
            incident = self._judge_incident(*started[:2])
            if incident is not None:
                self._evicted_totals.add(incident)
        del self._generations[oldest]
        self._cached_incidents.pop(oldest, None)


def track_incidents(events: Iterable[tuple[float, Event]]) -> IncidentTracker:
    """Record all events of a run, each with its time, in order. Nothing is dropped."""
    tracker = IncidentTracker(MAX_COUNT_VALUE, MAX_COUNT_VALUE)
    for t, event in events:
        tracker.record_at(event, t)
    return tracker


def _record_resume(state: GenerationState, event: Event, t: float) -> None:
    nodes, recomputed = event.get("nodes"), get_count(event, "recomputed_steps")
    state.start_t = min(t, state.start_t or t)
    if isinstance(nodes, list):
        state.listed_nodes = tuple(name for name in nodes if isinstance(name, str)) or state.listed_nodes
    state.recomputed_steps = (
        recomputed if state.recomputed_steps is None else max(recomputed or 0, state.recomputed_steps)
    )
    step = get_count(event, "step")
    state.start_step = state.start_step if step is None else step


# ---- the root cause ------------------------------------------------------------------------------------

_DEFINITE, _UNREACHABLE, _SECONDARY = 0, 1, 2
_FailureSigns = list[tuple[float | None, Failure]]


class EndAnalysis(NamedTuple):
    """Why a generation ended, when the first sign of that was seen, and what it cost."""

    end: GenerationEnd
    t: float | None
    recomputed_steps: int | None
    recovery_s: float | None


def analyze_end(state: GenerationState, next_state: GenerationState | None) -> EndAnalysis:
    """Analyze the end of a generation; ``next_state`` is None if there is no next one."""
    statuses = _complete_statuses(state, next_state)
    signs = _collect_signs(state, statuses)
    end = _determine_end(state, next_state, statuses, signs)
    seen = [t for t in (*(t for t, _ in signs), state.detected_t) if t is not None]
    detected_t = min(seen, default=state.workers_stopped_t)
    if next_state is None:
        return EndAnalysis(end, detected_t, None, None)
    estimates = [] if next_state.recomputed_steps is None else [next_state.recomputed_steps]
    if next_state.start_step is not None and state.last_step is not None:
        estimates.append(max(0, state.last_step - next_state.start_step))
    recovery_s = None
    first_sign_t = detected_t if detected_t is not None else state.last_event_t
    if end.kind != FINISHED and first_sign_t is not None and next_state.first_step_t is not None:
        recovery_s = round(max(0.0, next_state.first_step_t - first_sign_t), 3)
    return EndAnalysis(end, detected_t, max(estimates, default=None), recovery_s)


def _determine_end(
    state: GenerationState,
    next_state: GenerationState | None,
    statuses: Mapping[str, _AgentStatus],
    signs: _FailureSigns,
) -> GenerationEnd:
    causes, secondary = _split_root_causes(state, signs)
    own = [sign for sign in causes if state.root_causes or not sign[1].is_secondary]
    if _is_finished(state, statuses, own):
        return GenerationEnd(FINISHED, "finished")
    whole_job = _whole_job_end(state, next_state, statuses, own, signs)
    if whole_job is not None:
        return whole_job
    if own:
        return _failure_end(causes, secondary)
    joined = sorted(next_state.members - state.members) if next_state and state.knows_all_members else []
    descriptions = tuple(_describe(sign) for _, sign in signs)
    if joined and next_state and next_state.listed_nodes:
        # Agents stop their workers one after another, so a join leaves secondary failures only.
        return GenerationEnd(JOINED, f"{_format_nodes(joined)} joined", secondary_failures=descriptions)
    if state.restart_reason == NODES_JOINED_REASON or (
        state.has_surviving_agent and not state.restart_reason
    ):
        return GenerationEnd(JOINED, "nodes joined and left again", secondary_failures=descriptions)
    if causes:
        return _failure_end(causes, secondary)
    if next_state is not None:
        return GenerationEnd(UNKNOWN, state.restart_reason or "ended for an unknown reason")
    failed = [status for status in statuses.values() if status.kind == _FAILED]
    if failed:
        return GenerationEnd(UNKNOWN, failed[0].text or "the agents gave up without a reason", t=failed[0].t)
    return GenerationEnd(OPEN, "still running, or killed as a whole")


def _complete_statuses(state: GenerationState, next_state: GenerationState | None) -> dict[str, _AgentStatus]:
    """Add nodes without a status: a node is lost if the others continued, or gave up, without it."""
    statuses = dict(state.agent_statuses)
    gave_up = next_state is None and any(status.kind == _FAILED for status in statuses.values())
    missing = state.members if gave_up else frozenset()
    if next_state is not None and next_state.knows_all_members:
        missing = state.members - next_state.members
    for node in sorted(missing):
        statuses.setdefault(node, _AgentStatus(_LOST, None))
    return statuses


def _collect_signs(state: GenerationState, statuses: Mapping[str, _AgentStatus]) -> _FailureSigns:
    """Collect every failure that the events show, the likeliest root cause first."""
    dated: set[str] = set()
    found: list[tuple[int, float, float | None, Failure]] = []  # class, order, time, failure
    for node, events in state.events.items():
        was_lost = node in statuses and statuses[node].kind == _LOST
        kills = [
            event
            for event in events
            if was_lost and event["event"] == "worker-exit" and event.get("signal") == "SIGKILL"
        ]
        for t, failure in classify_with_times([event for event in events if event not in kills], node):
            found.append((_SECONDARY if failure.is_secondary else _DEFINITE, t, t, failure))
        if kills:  # the launcher shim saw its agent die
            t = kills[0]["t"]
            found.append((_DEFINITE, t, t, Failure(NODE_LOST, node, None)))
            dated.add(node)
    for node, status in statuses.items():
        if status.kind == _LOST and node not in dated:
            # No rank can finish a step without it, so it was alive at the others' last step.
            alive_t = max((t for t in (state.last_step_t, status.t) if t is not None), default=None)
            order = float("inf") if alive_t is None else alive_t
            found.append((_UNREACHABLE, order, alive_t, Failure(NODE_LOST, node, None)))
        elif status.kind == _SIGNALLED:
            failure = Failure(PREEMPTED, node, None)
            found.append((_DEFINITE, status.t or 0.0, status.t, failure))
    found.sort(key=lambda sign: (not sign[3].is_deterministic, *sign[:2]))
    return [(t, failure) for _, _, t, failure in found]


def _split_root_causes(state: GenerationState, signs: _FailureSigns) -> tuple[_FailureSigns, _FailureSigns]:
    """Split failures into root causes and secondary failures.

    The agents' verdict goes before the events. It may name a root cause whose own log is lost.
    """
    if not state.root_causes:
        primary = [sign for sign in signs if not sign[1].is_secondary] or signs[:1]
        return primary, [sign for sign in signs if sign not in primary]
    unmatched = list(signs)
    causes: _FailureSigns = []
    for cause in state.root_causes:
        sign = next((sign for sign in unmatched if _is_same_failure(sign[1], cause)), None)
        if sign:
            unmatched.remove(sign)
        is_announced = sign is not None and sign[1].kind == PREEMPTED
        causes.append(sign if sign and is_announced else (sign[0] if sign else None, cause))
    secondary: _FailureSigns = [(None, sign) for sign in state.secondary_failures]
    for sign in unmatched:
        if not any(_is_same_failure(sign[1], other) for other in state.secondary_failures):
            (secondary if sign[1].is_secondary else causes).append(sign)
    return causes, secondary


def _is_same_failure(failure: Failure, other: Failure) -> bool:
    is_node_failure = other.kind in NODE_FAILURE_KINDS
    same = (failure.kind in NODE_FAILURE_KINDS) if is_node_failure else failure.rank == other.rank
    return failure.node == other.node and same


def _is_finished(state: GenerationState, statuses: Mapping[str, _AgentStatus], causes: _FailureSigns) -> bool:
    """Whether the work was done. A failure after that ended nothing."""
    if not state.finished_ranks and not any(status.kind == _DONE for status in statuses.values()):
        return False
    for _, failure in causes:
        if failure.kind not in NODE_FAILURE_KINDS:
            if failure.rank not in state.finished_ranks:
                return False
        elif failure.node not in state.finished_nodes and (
            failure.node in state.observed_nodes or not state.finished_ranks
        ):
            return False
    return True


def _whole_job_end(
    state: GenerationState,
    next_state: GenerationState | None,
    statuses: Mapping[str, _AgentStatus],
    causes: _FailureSigns,
    signs: _FailureSigns,
) -> GenerationEnd | None:
    """Return the end of a generation whose nodes all stopped or died, so that none could continue."""
    kinds = {status.kind for status in statuses.values()}
    if not kinds or kinds - {_LOST, _SIGNALLED}:
        return None
    if any(failure.kind not in NODE_FAILURE_KINDS for _, failure in causes):
        return None
    is_known = state.knows_all_members and state.members <= statuses.keys()
    if not is_known and (_SIGNALLED not in kinds or next_state is None or state.root_causes):
        return None
    first_t = min((t for t, _ in signs if t is not None), default=None)
    secondary = tuple(_describe(failure) for _, failure in signs if failure.is_secondary)
    kind, text = WHOLE_JOB, "whole job killed"
    if _SIGNALLED in kinds:
        reasons = [status.text for status in statuses.values() if status.kind == _SIGNALLED and status.text]
        kind, text = STOPPED, min(reasons, default="stopped").rstrip(".")
    return GenerationEnd(kind, text, t=first_t, secondary_failures=secondary)


def _failure_end(causes: _FailureSigns, secondary: _FailureSigns) -> GenerationEnd:
    (t, root), *others = causes
    return GenerationEnd(
        root.kind,
        _describe(root),
        t,
        root.node,
        root.rank,
        tuple(_describe(failure) for _, failure in others),
        tuple(_describe(failure) for _, failure in secondary),
    )


def _describe(failure: Failure) -> str:
    return describe_failure(failure, with_node=True)


def _format_nodes(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return ("nodes " if len(names) > 1 else "node ") + shown


def _parse_failures(listed: Any) -> tuple[Failure, ...]:
    """Parse the failures in the list of a verdict event."""
    return tuple(
        Failure(
            **{name: str(entry.get(name) or "")[:MAX_TEXT_CHARS] for name in _TEXT_FIELDS},  # type: ignore[arg-type]
            rank=get_count(entry, "rank"),
            step=get_count(entry, "step"),
            nodes=get_count(entry, "nodes") or 1,
        )
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, Mapping) and entry.get("kind") in FAILURE_KINDS
    )
