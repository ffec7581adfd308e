"""Plan the proof of a resume, and judge it.

A node's memory holds two or three snapshots in a row. A generation can resume from an earlier one, compute
the newest again, and compare. If both are equal, then all that reaches the state was restored: weights,
optimizer, schedule, order of samples, random numbers, and what the script's own code does with them. If not,
the job restarts from the newest one, as without a proof.

Both snapshots are of one generation. Else the earlier one could be the result of the same wrong resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_resume.policy import resume_plan
from elastic_resume.policy.resume_plan import MEMORY, Inventory, ResumePlan, SavedState
from elastic_resume.units import format_count, to_printable

PROVED, ROUNDING, NOT_PROVED = "proved", "rounding", "not proved"
OFF, FIRST, ALWAYS, STOP = "off", "first", "always", "stop"
MODES = (FIRST, ALWAYS, OFF, STOP)
REHEARSE = "rehearse"  # as ALWAYS, and with another number of ranks too; `testing.rehearsal` sets it
MAX_PROOFS = 3  # of a script that is not proved; then its resumes cost no more than without a proof
# A difference may appear some steps after its cause, such as a base learning rate or an accumulated gradient.
MAX_PREFERRED_STEPS = 5
# Part of the steps' own change. Wrong resumes differed by 0.03 or more of it.
MAX_ROUNDING = 1e-3
MAX_NAMED = 4
PAGE = "docs/guides/check-your-port.md"

Moment = tuple[tuple[int, int], int]  # version and epoch of a saved state: the order of saved states


@dataclass(frozen=True)
class DifferingValue:
    """A value that differs: its name, and what it was and is, or how much of it differs."""

    name: str
    text: str
    is_tensor: bool


@dataclass(frozen=True)
class RankComparison:
    """What one rank has compared.

    ``differences`` are the first of ``count``. ``beyond_rounding``: more differs than the values of floating
    point tensors. ``error`` is the size of what differs, ``change`` that of what the steps changed, both the
    root of a sum of squares over all elements; ``change`` is 0 if unknown.
    """

    tensors: int
    values: int
    differences: tuple[DifferingValue, ...] = ()
    count: int = 0
    beyond_rounding: bool = False
    error: float = 0.0
    change: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """The result of a proof over the steps after ``first_step`` up to ``step``."""

    kind: str
    first_step: int
    step: int
    tensors: int = 0
    values: int = 0
    ranks: int = 0
    differences: tuple[DifferingValue, ...] = ()
    count: int = 0
    rounding: float = 0.0
    reason: str = ""
    """Why nothing could be compared."""
    is_resized: bool = False
    """The number of ranks has changed, so that sums are rounded differently, and each rank draws others."""


def plan_resume(inventories: Sequence[Inventory], mode: str, world_size: int | None) -> ResumePlan:
    """Choose the state to resume from: the newest, or an earlier one from which the newest is computed again.

    ``mode`` and errors are those of `resume_plan.choose_resume_plan`. ``world_size`` is the number of ranks;
    None proves with any number of ranks, where only schedules and hyperparameters can be equal.
    """
    plan = resume_plan.choose_resume_plan(inventories, mode)
    base = _find_base(inventories, plan, world_size)
    if base is None:
        return plan
    earlier = [
        replace(each, saved_states=tuple(s for s in each.saved_states if _moment(s) <= base), rejected=())
        for each in inventories
    ]
    replay = resume_plan.choose_resume_plan(earlier, mode)
    # The source stays: what may differ between ranks is compared with its own.
    return replace(
        replay,
        source_node=plan.source_node,
        source_rank=plan.source_rank,
        generation=plan.generation,
        rejected=plan.rejected,
        recomputed_steps=plan.recomputed_steps,
        target=plan.saved_state_for(plan.source_node),
    )


def _find_base(inventories: Sequence[Inventory], plan: ResumePlan, world_size: int | None) -> Moment | None:
    """Return the earlier state to resume from, or None if there is to be no proof."""
    newest = plan.saved_state_for(plan.source_node)
    if newest is None or newest.tier != MEMORY or not all(each.wants_proof for each in inventories):
        return None
    if any(each.replayed_version >= newest.version for each in inventories):
        return None  # the replay of that state has ended without a verdict, or the state was not proved
    leader_by_node = {each.node: each.local_leader_rank for each in inventories}
    has_moved = any(
        state.writer_rank != leader_by_node[node] for node, state in plan.holders if state.owner_node == node
    )
    sizes = {each.last_world_size for each in inventories if each.last_generation == newest.generation}
    if has_moved or (world_size is not None and sizes != {world_size}):
        return None  # other ranks read other samples and draw other random numbers
    earlier = sorted(
        _moment(state)
        for each in inventories
        for state in each.saved_states
        if each.node == plan.source_node
        and (state.tier, state.generation) == (MEMORY, newest.generation)
        and _moment(state) < _moment(newest)
    )
    target = _moment(newest)
    # Before the end of an epoch nothing is left to read: a script that uses its last batch there would fail.
    usable = [
        one for one in earlier if all(other[0] != one[0] for other in [*earlier, target] if other > one)
    ]
    near = [one for one in usable if newest.step - one[0][1] <= MAX_PREFERRED_STEPS]
    in_epoch = [one for one in near if one[1] == newest.epoch]
    return min(in_epoch or near, default=max(usable, default=None))


def _moment(state: SavedState) -> Moment:
    return state.version, state.epoch


def judge(
    first_step: int,
    step: int,
    comparisons: Sequence[RankComparison],
    reason: str = "",
    *,
    is_resized: bool = False,
) -> Verdict:
    """Judge the comparisons of all ranks that could compare. ``reason``: why the steps were not reached.

    ``is_resized``: the number of ranks has changed; then only what is no floating point tensor counts.
    """
    verdict = Verdict(
        PROVED,
        first_step,
        step,
        max((each.tensors for each in comparisons), default=0),
        max((each.values for each in comparisons), default=0),
        len(comparisons),
        is_resized=is_resized,
    )
    if reason:
        return replace(verdict, kind=NOT_PROVED, reason=reason)
    worst = max(comparisons, key=lambda each: each.count, default=None)
    if worst is None or not worst.count:
        return verdict
    differing = [each for each in comparisons if each.count]
    rounding = max(each.error / each.change if each.change else 1.0 for each in differing)
    is_rounding = (is_resized or rounding <= MAX_ROUNDING) and not any(
        each.beyond_rounding for each in differing
    )
    kind = ROUNDING if is_rounding else NOT_PROVED
    return replace(verdict, kind=kind, differences=worst.differences, count=worst.count, rounding=rounding)


def describe(verdict: Verdict) -> str:
    """Return the verdict in one line, without what happens next."""
    count = verdict.step - verdict.first_step
    steps = (
        f"steps {verdict.first_step + 1} to {verdict.step} were" if count > 1 else f"step {verdict.step} was"
    )
    if not count:
        steps = f"the end of the epoch at step {verdict.step} was"
    what = f"{steps} computed again after the resume"
    compared = (
        f"{format_count(verdict.tensors, 'tensor')} and {format_count(verdict.values, 'other value')} on "
        f"{format_count(verdict.ranks, 'rank')}"
    )
    if verdict.kind == PROVED:
        return f"the resume is proved: {what}, with the same bits in {compared}"
    if verdict.kind == ROUNDING and verdict.is_resized:
        return (
            f"the resume with another number of ranks keeps the schedule: {what}; hyperparameters, "
            "schedules and all other values that are no tensors are the same; weights differ by "
            f"{verdict.rounding:.1g} of what the steps changed"
        )
    if verdict.kind == ROUNDING:
        return (
            f"the resume is proved but for rounding: {what}, and {format_count(verdict.count, 'tensor')} "
            f"differ by at most {verdict.rounding:.1g} of what the steps changed: some operations of this "
            "script are not deterministic"
        )
    if verdict.reason:
        return f"THE RESUME IS NOT PROVED: {verdict.reason}"
    named = "; ".join(f"{each.name}: {each.text}" for each in verdict.differences[:MAX_NAMED])
    more = f"; and {verdict.count - MAX_NAMED} more" if verdict.count > MAX_NAMED else ""
    text = f"THE RESUME IS NOT PROVED: {what}, and the result differs: {named}{more}. {_find_cause(verdict)}"
    return to_printable(text, 2000)


def _find_cause(verdict: Verdict) -> str:
    """Return what usually causes such differences."""
    names = [each.name for each in verdict.differences if not each.is_tensor]
    if any(name.startswith(("optimizer", "scheduler")) for name in names):
        return (
            "Usual cause: a learning rate or another hyperparameter that the script computes from a number "
            "of its own, such as the loop's index: compute it from run.position."
        )
    return (
        "Usual causes: samples or random numbers in another order; requires_grad changed while training; "
        "something that the script keeps and no tracked object holds, such as a counter or an average."
    )
