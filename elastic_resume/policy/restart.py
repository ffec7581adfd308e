"""Decide whether a job restarts, gives up or excludes a node after a generation, and how an agent ends.

The job restarts as long as it makes progress: a step that no earlier generation reached. A change of
membership never counts against it. The job gives up on a failure that a restart would meet again:

- an error that the script itself calls deterministic, an import or syntax error, or a wrong argument;
- the same exception on every node before the first step;
- the same exception at the same step `RestartLimits.max_same_failures` times in a row;
- `RestartLimits.max_no_progress` failed generations in a row without progress.

If one node alone caused these failures and the others are enough, that node is excluded instead. A node with
a broken GPU is excluded at the first time, even if the others are too few: they wait for another node.

Every node decides for itself, from the failures that the leader has given to all and from its own steps.
These rarely differ; the first node that gives up ends the job for all. A node that joined later knows less
and continues; it learns of the end of the job from the others.

`EXIT_REQUEUE` (75) requests that the agent's launcher run the job again. Under Slurm that is the batch
script, which reads the exit code of srun. No agent requests a requeue itself. Agents query Slurm only for the
job's time limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from elastic_resume import constants
from elastic_resume.events import Event
from elastic_resume.policy import failure_classification
from elastic_resume.policy.failure_classification import (
    Failure,
    FailureVerdict,
    MemoryPressure,
    WorkerEnd,
    separate_root_causes,
)
from elastic_resume.policy.gpu_faults import GpuError, GpuFault

MAX_NO_PROGRESS = 3  # the same limit as in the NVIDIA Resiliency Extension
MAX_SAME_FAILURES = 3  # three in a row are no coincidence
UNLIMITED = 1 << 30
MAX_RESTART_DELAY_S = 60.0
# A wrong environment or script raises these; no transient fault does.
_UNSTARTABLE_ERRORS = frozenset(
    {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"}
)
_USAGE_EXIT_CODE = 2  # of argparse, for a wrong argument; of Python, for a script that it cannot read


@dataclass(frozen=True)
class RestartLimits:
    """The limits that a user can set.

    ``exclude_after``: exclude a node that alone caused so many failures in a row, even if steps advance. 0:
    exclude it only where the job would otherwise give up. ``max_restarts``: how often one node's own workers
    may fail, whether or not steps advance.
    """

    max_no_progress: int = MAX_NO_PROGRESS
    exclude_after: int = 0
    max_same_failures: int = MAX_SAME_FAILURES
    min_nodes: int = 1
    max_restarts: int = UNLIMITED


@dataclass(frozen=True)
class WorldSummary:
    """The members of the new generation, and the newest step that any of them has finished.

    ``newest_step`` counts since the agents started; 0 means that nothing has worked yet.
    """

    nodes: tuple[str, ...] = ()
    newest_step: int = 0
    finished_nodes: tuple[str, ...] = ()
    """Nodes whose workers have succeeded."""


@dataclass(frozen=True)
class GenerationResult:
    """The outcome of one generation on one node.

    ``failed`` is true if a worker ended it, and false if membership changed or the workers finished.
    ``failures`` are those of all nodes in order of arrival; before the leader has sent them, those of this
    node.
    """

    failed: bool
    start_step: int | None = None  # the step from which the generation resumed
    newest_step: int | None = None
    failures: tuple[Failure, ...] = ()
    num_nodes: int = 1

    @property
    def verdict(self) -> FailureVerdict:
        """Separate root causes from secondary failures."""
        return separate_root_causes(self.failures)

    @property
    def finished_a_step(self) -> bool:
        """Whether this node finished a step in it."""
        return self.newest_step is not None and self.newest_step > (self.start_step or 0)


@dataclass(frozen=True)
class GenerationReport:
    """A node's report of a generation that has ended: its failure, its newest step, its restart delay."""

    failure: Failure | None = None
    newest_step: int = 0
    restart_delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SameErrorAgain:
    """Starting again would meet the same error: it is deterministic, or the script cannot start."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class SameErrorEverywhere:
    """All nodes met the same error before the first step."""

    failure: Failure
    num_nodes: int


@dataclass(frozen=True, slots=True)
class StepFails:
    """A step has failed with the same exception so many times in a row; `failure` is the last."""

    failure: Failure
    step: int
    times: int


@dataclass(frozen=True, slots=True)
class NoProgress:
    """So many starts in a row failed without a step newer than `step`; `failure` is the last."""

    failure: Failure | None
    starts: int
    step: int


@dataclass(frozen=True, slots=True)
class EndedElsewhere:
    """The workers of other nodes have succeeded, and a script that resumes no state would start over."""

    failure: Failure | None
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RestartsExhausted:
    """The workers of a node have failed more often than ``--max-restarts`` allows."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class WorkerStuck:
    """A worker does not die of SIGKILL, so no other can start beside it."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class GpuBroken:
    """A GPU of the node is broken, or gone."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class MachineBroken:
    """The machine of the node computes wrongly."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class CausedAlone:
    """One node alone caused the last failures; `failure` is the last of them."""

    failure: Failure
    times: int


@dataclass(frozen=True, slots=True)
class CannotStart:
    """The script cannot start on one node, and has trained on the others."""

    failure: Failure


GiveUpReason = (
    SameErrorAgain | SameErrorEverywhere | StepFails | NoProgress | RestartsExhausted | EndedElsewhere
)
ExclusionReason = WorkerStuck | GpuBroken | MachineBroken | CausedAlone | CannotStart


@dataclass(frozen=True, slots=True)
class Continue:
    """The job restarts."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job ends on all nodes."""

    reason: GiveUpReason


@dataclass(frozen=True, slots=True)
class Exclude:
    """The node leaves, and the others continue."""

    node: str
    reason: ExclusionReason


RestartDecision = Continue | GiveUp | Exclude


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A node ended the job."""

    node: str
    reason: GiveUpReason


@dataclass(frozen=True, slots=True)
class JudgedFailure:
    """A mechanism ended the job: the judge of ``topic``. ``body`` is for its agents, ``text`` for people."""

    topic: str
    generation: int
    body: str
    text: str


JobFailure = GaveUp | JudgedFailure
"""Why the job fails on all nodes."""


def summarize_generation(
    events: Iterable[Event],
    *,
    node: str,
    num_nodes: int = 1,
    newest_step: int | None = None,
    memory_pressure: MemoryPressure | None = None,
) -> GenerationResult:
    """Summarize the events of one node since the generation began, and the newest step of its workers."""
    events = list(events)
    starts = [_step_or_none(event) for event in events if event["event"] == "worker-start"]
    reached = [*starts, newest_step]
    failures = failure_classification.classify_failures(events, node, memory_pressure)
    return GenerationResult(
        failed=bool(failures) and not is_way_back(failures),
        start_step=min((step for step in starts if step is not None), default=None),
        newest_step=max((step for step in reached if step is not None), default=None),
        failures=failures,
        num_nodes=num_nodes,
    )


def merge_reported_failures(
    result: GenerationResult, reported: Sequence[Failure], *, membership_changed: bool
) -> GenerationResult:
    """Return the result with the failures of all nodes, as the leader has sent them.

    If membership changed, workers failed because nodes came or went. That does not count against the job,
    unless an error is deterministic.
    """
    result = replace(result, failures=tuple(reported) or result.failures)
    root = result.verdict.root_cause
    if root is None:
        return replace(result, failed=result.failed and not membership_changed)
    if root.is_deterministic:
        return replace(result, failed=True)
    uncounted = {*failure_classification.NODE_FAILURE_KINDS, failure_classification.NOT_PROVED}
    return replace(result, failed=not membership_changed and root.kind not in uncounted)


def is_way_back(failures: Sequence[Failure]) -> bool:
    """Whether the workers ended only to go back to a kept state: their resume was not proved."""
    root = separate_root_causes(failures).root_cause
    return root is not None and root.kind == failure_classification.NOT_PROVED and not root.is_deterministic


def decide_own_exclusion(node: str, failures: Iterable[Failure]) -> Continue | Exclude:
    """Decide whether ``node`` can start workers at all, by the failures that its agent alone knows."""
    for failure in failures:
        if failure.kind == failure_classification.STUCK:
            return Exclude(node, WorkerStuck(failure))
        if failure.kind == failure_classification.HARDWARE:
            return Exclude(node, MachineBroken(failure))
        if isinstance(failure.cause, GpuFault) and failure.cause.is_reported:
            return Exclude(node, GpuBroken(failure))
    return Continue()


def decide_restart(
    history: Sequence[GenerationResult], limits: RestartLimits, world: WorldSummary | None = None
) -> RestartDecision:
    """Decide after the last generation of ``history`` (oldest first) has ended."""
    world = world or WorldSummary()
    last, root = history[-1], history[-1].verdict.root_cause
    if not last.failed:
        return Continue()
    has_resumed = world.newest_step or any(result.start_step is not None for result in history)
    if world.finished_nodes and not has_resumed:
        return GiveUp(EndedElsewhere(root, world.finished_nodes))
    if root is not None and root.is_deterministic:
        return GiveUp(SameErrorAgain(root))
    hopeless = _decide_unstartable(last, limits, world) or _decide_deterministic_failure(history, limits)
    if hopeless is not None:
        return hopeless
    counted = [result for result in history if not result.failed or _has_cause_in_world(result, world)]
    stuck = count_failures_without_progress(counted)
    alone = _single_node_failures(history)
    broken = _find_broken_gpu(last, alone, world)
    if broken is not None:
        return Exclude(broken.node, GpuBroken(broken))
    can_exclude = bool(alone) and _has_enough_without(alone[0].node, limits, world)
    # At one step, the sample or the script is at fault.
    has_two_accesses = len({failure.step for failure in alone[:2]}) == 2 and all(
        failure.gpu_error is GpuError.ACCESS for failure in alone[:2]
    )
    is_excluded_early = has_two_accesses or 0 < limits.exclude_after <= len(alone)
    if can_exclude and (is_excluded_early or limits.max_no_progress <= stuck <= len(alone)):
        return Exclude(alone[0].node, CausedAlone(alone[0], len(alone)))
    if stuck < limits.max_no_progress:
        return Continue()
    reached = max((result.newest_step or 0 for result in history), default=0)
    return GiveUp(NoProgress(root, stuck, reached))


def restart_delay_s(history: Sequence[GenerationResult]) -> float:
    """Return the seconds to wait before the next start: 0 after a first failure, then 1, 2, 4 and so on."""
    repeats = count_failures_without_progress(history) - 1
    return min(MAX_RESTART_DELAY_S, 2.0 ** min(repeats - 1, 16)) if repeats > 0 else 0.0


def count_failures_without_progress(history: Sequence[GenerationResult]) -> int:
    """Count the failed generations since the last progress.

    A generation that starts at an earlier step than its predecessor has lost saved states. Training then
    recomputes steps, and the steps reached before no longer count. If it starts at a later step than this
    node has reached, other nodes trained without it; that is no progress of a node that fails.
    """
    best: int | None = None
    started: int | None = None
    stuck = 0
    for result in history:
        if result.start_step is not None:
            if started is not None and result.start_step < started:
                best = result.start_step
            elif best is not None:
                best = max(best, result.start_step)
            started = result.start_step
        base = best if best is not None else result.start_step
        if result.newest_step is not None and (base is None or result.newest_step > base):
            stuck = 0
        elif result.failed:
            stuck += 1
        if result.newest_step is not None:
            best = result.newest_step if best is None else max(best, result.newest_step)
    return stuck


def find_newest_step(history: Sequence[GenerationResult]) -> int:
    """Return the newest step finished in these generations, or 0."""
    return max((result.newest_step or 0 for result in history if result.finished_a_step), default=0)


def _decide_unstartable(
    last: GenerationResult, limits: RestartLimits, world: WorldSummary
) -> RestartDecision | None:
    """Give up, or exclude a node, if the script cannot start."""
    root = last.verdict.root_cause
    if root is None or last.finished_a_step:
        return None
    is_wrong_use = (
        root.kind == failure_classification.EXIT
        and isinstance(root.cause, WorkerEnd)
        and root.cause.exit_code == _USAGE_EXIT_CODE
        and last.start_step is None
        and not world.newest_step  # the script has worked: its file may be out of reach for a while
    )
    if root.kind != failure_classification.EXCEPTION and not is_wrong_use:
        return None
    if is_wrong_use or root.type in _UNSTARTABLE_ERRORS:
        if not (world.newest_step and _has_enough_without(root.node, limits, world)):
            return GiveUp(SameErrorAgain(root))
        return Exclude(root.node, CannotStart(root))
    # On a single node it is unknown whether the script or the machine is at fault.
    if not world.newest_step and 1 < last.num_nodes <= root.nodes:
        return GiveUp(SameErrorEverywhere(root, last.num_nodes))
    return None


def _decide_deterministic_failure(
    history: Sequence[GenerationResult], limits: RestartLimits
) -> RestartDecision | None:
    """Give up if one step has failed with the same exception again and again."""
    roots = [result.verdict.root_cause for result in history if result.failed][-limits.max_same_failures :]
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
    return GiveUp(StepFails(roots[-1] or first, first.step + 1, limits.max_same_failures))


def _single_node_failures(history: Sequence[GenerationResult]) -> list[Failure]:
    """Return the newest consecutive failures that one node alone caused, newest first."""
    found: list[Failure] = []
    for result in reversed(history):
        if not result.failed:
            continue
        causes = result.verdict.root_causes
        if len(causes) != 1 or causes[0].nodes > 1 or causes[0].is_secondary:
            break
        if found and causes[0].node != found[0].node:
            break
        found.append(causes[0])
    return found


def _find_broken_gpu(last: GenerationResult, alone: Sequence[Failure], world: WorldSummary) -> Failure | None:
    """Return the failure of a member's GPU with which it cannot train on, as far as texts of errors tell.

    If all nodes report one, they quote one text, or share what is broken.
    """
    if len(alone) >= 2 and world.newest_step and alone[0].node in world.nodes:
        missing = [failure for failure in alone[:2] if failure.gpu_error is GpuError.MISSING]
        if len(missing) == 2:
            return missing[0]
    causes = [failure for failure in last.verdict.root_causes if failure.kind == failure_classification.GPU]
    if last.num_nodes > 1 and sum(failure.nodes for failure in causes) >= last.num_nodes:
        return None
    return next((failure for failure in causes if failure.node in world.nodes), None)


def _has_cause_in_world(result: GenerationResult, world: WorldSummary) -> bool:
    """Whether a failed generation has a root cause on a node that is still a member."""
    causes = result.verdict.root_causes
    return (
        not world.nodes or not causes or any(cause.nodes > 1 or cause.node in world.nodes for cause in causes)
    )


def _has_enough_without(node: str, limits: RestartLimits, world: WorldSummary) -> bool:
    return node in world.nodes and len(world.nodes) - 1 >= limits.min_nodes


def _step_or_none(event: Event) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) else None


# ---- the end of an agent --------------------------------------------------------------------------------

# Time to deliver signals and to take leave of the leader.
SIGNAL_SLACK_S = 5.0
DRAIN_RESERVE_S = 1.0  # what a drained worker needs to end, beside steps and snapshots
MAX_UNANNOUNCED_S = 0.5  # until its agent has announced the drain


class AgentEnd(Enum):
    """How an agent ends, as far as its exit code depends on it."""

    OTHER = "other"  # the job ended here, or was stopped by a signal whose sender decides about a restart
    JOB_DRAINED = "job drained"  # the time limit of all nodes is near
    NODE_LEFT = "node left"  # unfit, or about to be stopped; other nodes may continue


def is_worth_requeue(reason: object) -> bool:
    """Whether the job ended for something that another start, some time later, may not meet."""
    given_up = reason.reason if isinstance(reason, GaveUp) else None
    return isinstance(given_up, SameErrorAgain) and given_up.failure.is_worth_requeue


def decide_exit_code(end: AgentEnd, code: int, *, speaks_for_job: bool) -> int:
    """Return the exit code of an agent that would otherwise end with ``code``.

    srun returns the highest exit code of all nodes, even of a node that left long ago. With 75 the batch
    script would requeue a job that the other nodes have finished. So a node that leaves ends with 0, unless
    it speaks for the job: it has rank 0 and may be the last one, or srun merges its code with no other.
    """
    if end is AgentEnd.OTHER:
        return code
    return constants.EXIT_REQUEUE if speaks_for_job or end is AgentEnd.JOB_DRAINED else constants.EXIT_SUCCESS


def drain_margin_s(grace_s: float, commit_s: float, time_to_limit_s: float) -> float:
    """Return how long before its time limit a node is drained.

    Each node of a job computes it, and all should start together. Commit times differ a little between them,
    so the result is rounded up to the next of 10, 20, 40, ... seconds.

    Args:
        grace_s: grace of a worker.
        commit_s: time of a commit; 0 if there has been none.
        time_to_limit_s: from this agent's start to the limit; training gets at least half of it.
    """
    commit = 10.0
    while commit < min(2 * commit_s, 3600.0):  # twice: at the end all nodes may write to one disk
        commit *= 2
    return min(grace_s + commit + SIGNAL_SLACK_S, max(0.0, time_to_limit_s) // 2)


def may_drained_worker_end(
    now: float,
    requested_at: float,
    *,
    announced_at: float | None,
    left_s: float,
    step_s: float,
    snapshot_s: float = 0.0,
    boundaries: int = 1,
) -> bool:
    """Return whether a worker of a drained node ends at this step boundary, or trains on.

    It trains on until the other nodes take a snapshot of each step: its last step then costs nobody anything.
    Times are of one monotonic clock.

    Args:
        now: the time.
        requested_at: when the worker was asked to end.
        announced_at: when all nodes know of the drain; None: the agent has not announced it yet.
        left_s: the rest of the grace.
        step_s: time of a step; 0 if it is unknown.
        snapshot_s: what a snapshot costs, of which one more is taken.
        boundaries: how many further step boundaries it needs.
    """
    until = requested_at + MAX_UNANNOUNCED_S if announced_at is None else announced_at
    if now >= until:
        return True
    reserve_s = DRAIN_RESERVE_S + 2 * snapshot_s
    return left_s < until - now + boundaries * step_s + reserve_s
