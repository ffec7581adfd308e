"""Whether to go on after a round ended: the history of one node in, a decision out. Pure.

A restart costs nothing while training advances, and a change of membership costs nothing ever. What ends a
job is a failure that a restart would meet again: one that the worker itself calls its own fault, a script
that cannot be imported, the same exception on every node before anybody took a step, the same exception at
the same step three times, or a standstill `Limits.max_no_progress` times in a row. Progress is a step that
no earlier round reached. A node that causes the trouble alone is left out, where the others are enough.

Every node decides for itself, from what the coordinator told all of them: so those that were there come
to the same. One that came later knows less and goes on; it hears of the end from the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from elastic_resume.events import Event
from elastic_resume.policy import failure_classification
from elastic_resume.policy.failure_classification import (
    Failure,
    FailureVerdict,
    MemoryPressure,
    describe_failure,
    separate_root_causes,
)

MAX_NO_PROGRESS = 3  # NVRx gives up after as many cycles without growth
MAX_SAME_FAILURES = (
    3  # times the same exception at the same step: chance is ruled out, and more would only cost
)
UNLIMITED = 1 << 30
MAX_RESTART_DELAY_S = 60.0
# What a script meets whose environment or text is wrong. Nothing that passes by itself raises them.
_UNSTARTABLE_ERRORS = frozenset(
    {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"}
)


@dataclass(frozen=True)
class RestartLimits:
    """What the user may set.

    ``exclude_after``: a node that caused so many failures in a row, alone, leaves, though steps advance. 0:
    only where the job would have to be given up for it.
    """

    max_no_progress: int = MAX_NO_PROGRESS
    exclude_after: int = 0
    max_same_failures: int = MAX_SAME_FAILURES
    min_nodes: int = 1


@dataclass(frozen=True)
class WorldSummary:
    """What this node knows of the world that has just formed.

    ``nodes`` are its members; none where a stock rendezvous does not tell them. ``step`` is the newest that
    any of them has finished since its agent started: 0 for a job in which nothing has worked yet.
    """

    nodes: tuple[str, ...] = ()
    newest_step: int = 0


@dataclass(frozen=True)
class RoundResult:
    """What one round came to.

    ``failed`` means that a worker ended it; a round that ended because nodes came or went, or that workers
    finished, did not fail. ``failures`` are those of all nodes where that is known, in order of arrival;
    of this node until then. ``nodes`` is how many nodes the round had.
    """

    failed: bool
    start_step: int | None = None  # the step it started from
    newest_step: int | None = None
    failures: tuple[Failure, ...] = ()
    num_nodes: int = 1

    @property
    def verdict(self) -> FailureVerdict:
        """Causes and what followed from them."""
        return separate_root_causes(self.failures)

    @property
    def finished_a_step(self) -> bool:
        """Whether a step was finished in it on this node."""
        return self.newest_step is not None and self.newest_step > (self.start_step or 0)


@dataclass(frozen=True)
class RoundSummary:
    """What a node tells of a round that has ended: how a worker of its own failed, and how far it has come.

    ``pause_s`` is how long it waits before it starts again.
    """

    failure: Failure | None = None
    newest_step: int = 0
    restart_delay_s: float = 0.0


class RestartAction(Enum):
    """What to do."""

    CONTINUE = "go on"
    GIVE_UP = "give up"
    EXCLUDE = "exclude"


@dataclass(frozen=True)
class RestartDecision:
    """Go on, give the job up, or leave out ``node``, for ``reason``: a whole sentence for people."""

    action: RestartAction
    reason: str = ""
    node: str = ""

    @property
    def ends_job(self) -> bool:
        """Whether the job ends."""
        return self.action is RestartAction.GIVE_UP


CONTINUE = RestartDecision(RestartAction.CONTINUE)


def summarize_round(
    events: Iterable[Event],
    *,
    node: str,
    failed: bool,
    num_nodes: int = 1,
    memory_pressure: MemoryPressure | None = None,
) -> RoundResult:
    """Fold the events of one node since its round began."""
    events = list(events)
    starts = [_step_or_none(event) for event in events if event["event"] == "worker-start"]
    reached = [
        _step_or_none(event) for event in events if event["event"] in {"worker-start", "step", "commit"}
    ]
    return RoundResult(
        failed=failed,
        start_step=min((step for step in starts if step is not None), default=None),
        newest_step=max((step for step in reached if step is not None), default=None),
        failures=failure_classification.classify_round(events, node, memory_pressure),
        num_nodes=num_nodes,
    )


def merge_reported_failures(
    result: RoundResult, reported: Sequence[Failure], *, membership_changed: bool
) -> RoundResult:
    """Give the round with what the coordinator told of it.

    ``changed``: the next world has other members. What came or went took workers along: their failure says
    nothing about the job, unless they say so themselves.
    """
    result = replace(result, failures=tuple(reported) or result.failures)
    root = result.verdict.root_cause
    if root is None:
        return replace(result, failed=result.failed and not membership_changed)
    if root.is_deterministic:
        return replace(result, failed=True)
    return replace(
        result, failed=not membership_changed and root.kind not in failure_classification.NODE_FAILURE_KINDS
    )


def decide_restart(
    history: Sequence[RoundResult], limits: RestartLimits, world: WorldSummary | None = None
) -> RestartDecision:
    """Decide after the last round of ``history`` (oldest first) has ended."""
    world = world or WorldSummary()
    last, root = history[-1], history[-1].verdict.root_cause
    if not last.failed:
        return CONTINUE
    if root is not None and root.is_deterministic:
        return RestartDecision(
            RestartAction.GIVE_UP, f"{describe_failure(root)}. Starting again would meet the same error."
        )
    hopeless = _decide_unstartable(history, limits, world) or _decide_deterministic_failure(history, limits)
    if hopeless is not None:
        return hopeless
    counted = [this for this in history if not this.failed or _has_cause_in_world(this, world)]
    stuck = count_rounds_without_progress(counted)
    alone = _single_node_failures(history)
    node = alone[0].node if alone else ""
    enough = _has_enough_without(node, limits, world)
    if alone and enough and 0 < limits.exclude_after <= len(alone):
        return RestartDecision(RestartAction.EXCLUDE, _describe_exclusion(alone, node), node)
    if stuck < limits.max_no_progress:
        return CONTINUE
    if enough and stuck <= len(alone):
        return RestartDecision(RestartAction.EXCLUDE, _describe_exclusion(alone, node), node)
    reached = max((r.newest_step for r in history if r.newest_step is not None), default=None)
    where = "before the first step" if not reached else f"at step {reached}"
    starts = f"{stuck} starts in a row" if stuck > 1 else "a start"
    return RestartDecision(
        RestartAction.GIVE_UP,
        f"{starts} failed without progress, {where}. Last: {describe_failure(root)}.",
    )


def restart_delay_s(history: Sequence[RoundResult]) -> float:
    """Seconds to wait before the next start: none after a first failure, then 1, 2, 4 and so on."""
    repeats = count_rounds_without_progress(history) - 1
    return min(MAX_RESTART_DELAY_S, 2.0 ** min(repeats - 1, 16)) if repeats > 0 else 0.0


def count_rounds_without_progress(history: Sequence[RoundResult]) -> int:
    """Count the failed rounds since a step was reached that no earlier round had reached.

    When a round starts below where the one before it started, copies were lost and training climbs
    again over steps it has seen: what it reached before no longer counts.
    """
    best: int | None = None
    started: int | None = None
    stuck = 0
    for this in history:
        if this.start_step is not None:
            if started is not None and this.start_step < started:
                best = this.start_step
            started = this.start_step
        base = best if best is not None else this.start_step
        if this.newest_step is not None and (base is None or this.newest_step > base):
            stuck = 0
        elif this.failed:
            stuck += 1
        if this.newest_step is not None:
            best = this.newest_step if best is None else max(best, this.newest_step)
    return stuck


def find_newest_step(history: Sequence[RoundResult]) -> int:
    """The newest step finished in these rounds; 0 where none was."""
    return max((this.newest_step or 0 for this in history if this.finished_a_step), default=0)


def _decide_unstartable(
    history: Sequence[RoundResult], limits: RestartLimits, world: WorldSummary
) -> RestartDecision | None:
    """Whether the script cannot run as it is."""
    last, root = history[-1], history[-1].verdict.root_cause
    if root is None or last.finished_a_step or root.kind != failure_classification.EXCEPTION:
        return None
    if root.type in _UNSTARTABLE_ERRORS:
        if world.newest_step and _has_enough_without(root.node, limits, world):
            reason = (
                f"{describe_failure(root)}. The others have trained: this node's environment is not theirs."
            )
            return RestartDecision(RestartAction.EXCLUDE, reason, root.node)
        return RestartDecision(
            RestartAction.GIVE_UP, f"{describe_failure(root)}. Starting again would meet the same error."
        )
    # With one node nobody else tells whether it is the script or the machine.
    if not world.newest_step and 1 < last.num_nodes <= root.nodes:
        return RestartDecision(
            RestartAction.GIVE_UP,
            f"the same error on all {last.num_nodes} nodes before anybody took a step: {describe_failure(root)}.",
        )
    return None


def _decide_deterministic_failure(
    history: Sequence[RoundResult], limits: RestartLimits
) -> RestartDecision | None:
    """Whether one step ends in the same exception whoever runs it."""
    roots = [this.verdict.root_cause for this in history if this.failed][-limits.max_same_failures :]
    first = roots[0]
    if len(roots) < limits.max_same_failures or first is None or first.step is None:
        return None
    if any(
        root is None
        or root.kind not in {failure_classification.EXCEPTION, failure_classification.DIVERGENCE}
        or root.is_secondary
        or (root.step, root.signature) != (first.step, first.signature)
        for root in roots
    ):
        return None
    return RestartDecision(
        RestartAction.GIVE_UP,
        f"step {first.step + 1} is poisoned: {limits.max_same_failures} times in a row it ended in the same "
        f"exception. Last: {describe_failure(roots[-1])}. Look at what is special about this step: its samples, say.",
    )


def _single_node_failures(history: Sequence[RoundResult]) -> list[Failure]:
    """The causes of the newest failures in a row that one and the same node had alone, the newest first."""
    found: list[Failure] = []
    for this in reversed(history):
        if not this.failed:
            continue
        causes = this.verdict.root_causes
        if len(causes) != 1 or causes[0].nodes > 1 or causes[0].is_secondary:
            break
        if found and causes[0].node != found[0].node:
            break
        found.append(causes[0])
    return found


def _has_cause_in_world(result: RoundResult, world: WorldSummary) -> bool:
    """Whether a failed round has a cause on a node that is still there."""
    causes = result.verdict.root_causes
    return not world.nodes or not causes or any(one.nodes > 1 or one.node in world.nodes for one in causes)


def _has_enough_without(node: str, limits: RestartLimits, world: WorldSummary) -> bool:
    return node in world.nodes and len(world.nodes) - 1 >= limits.min_nodes


def _describe_exclusion(failures: Sequence[Failure], node: str) -> str:
    times = f"the last {len(failures)} failures were" if len(failures) > 1 else "the failure was"
    return f"{times} of node {node} alone. Last: {describe_failure(failures[0])}."


def _step_or_none(event: Event) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) else None
