"""Plan the proof of a resume, and judge it.

A node's memory holds two or three snapshots in a row. A generation can resume from an earlier one, compute
the newest again, and compare. If both are equal, then all that reaches the state was restored: weights,
optimizer, schedule, order of samples, random numbers, and what the script's own code does with them. If not,
the job restarts from the newest one, as without a proof.

Both snapshots are of one generation. Else the earlier one could be the result of the same wrong resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_resume.policy import going_back, resume_plan
from elastic_resume.policy.resume_plan import MEMORY, Inventory, ResumePlan, SavedState
from elastic_resume.units import format_count, to_printable

PROVED, ROUNDING, RESUMED, NOT_PROVED = "proved", "rounding", "resumed", "not proved"
OFF, FIRST, ALWAYS, STOP = "off", "first", "always", "stop"
MODES = (FIRST, ALWAYS, OFF, STOP)
REHEARSE = "rehearse"  # as ALWAYS, and with another number of ranks too; `testing.rehearsal` sets it
MAX_PROOFS = 3  # After so many that do not end well, resumes cost no more than without a proof.
# A difference may appear some steps after its cause, such as a base learning rate or an accumulated gradient.
MAX_PREFERRED_STEPS = 5
# Part of the steps' own change of a tensor. Wrong resumes differed by 0.03 or more of it.
MAX_ROUNDING = 1e-3
# Some tensors change by rounding alone, such as the bias of keys in attention under Adam.
ROUNDED_SHARE = 0.9
UNMEASURED = 1e9
MAX_NAMED = 4
HYPERPARAMETERS = ("optimizer", "scheduler")
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

    ``differences`` are the first of ``count``. ``beyond_rounding``: more differs than elements of floating
    point tensors. ``rounding`` is how much they differ, as a part of what the steps changed (see
    `summarize_ratios`). ``is_batch_changed``: the steps have read another number of samples.
    """

    tensors: int
    values: int
    differences: tuple[DifferingValue, ...] = ()
    count: int = 0
    beyond_rounding: bool = False
    rounding: float = 0.0
    is_batch_changed: bool = False


def summarize_ratios(errors: Sequence[float], changes: Sequence[float]) -> float:
    """Return how much tensors differ as a part of how much the steps changed them; `UNMEASURED` if unknown.

    ``errors`` and ``changes`` are the norms of both for each differing tensor. It is the greater of two: the
    ratio that nine tenths of the tensors do not exceed, and that of all tensors together.
    """
    ratios = [error / change if change else UNMEASURED for error, change in zip(errors, changes, strict=True)]
    ratios = sorted(min(UNMEASURED, ratio) for ratio in ratios)  # so NaN counts as unmeasured
    most = ratios[max(0, math.ceil(ROUNDED_SHARE * len(ratios)) - 1)]
    total = math.hypot(*changes)
    worst = max(most, math.hypot(*errors) / total if total else UNMEASURED)
    return min(UNMEASURED, worst)


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
    within_epoch: bool = True
    """The steps do not begin with an epoch. If they do, a resume within one is still to be proved."""
    is_batch_changed: bool = False


def plan_with_proof(inventories: Sequence[Inventory], mode: str, world_size: int) -> ResumePlan:
    """Choose the state to resume from: the newest, or an earlier one from which the newest is computed again.

    ``mode`` and errors are those of `going_back.plan_with_request`.
    """
    plan = going_back.plan_with_request(inventories, mode)
    newest = plan.saved_state_for(plan.source_node)
    if newest is None or plan.goes_back or not _can_be_repeated(inventories, plan, newest, world_size):
        return plan
    if len(plan.holders) < min(2, len(inventories)):  # nothing is sent before the verdict
        return replace(plan, unproved=f"{plan.source_node} alone holds this step")
    base = _choose_base(next(i.saved_states for i in inventories if i.node == plan.source_node), newest)
    if base is None:
        return replace(plan, unproved="no earlier snapshot is in memory")
    earlier = [
        replace(
            each,
            saved_states=tuple(s for s in each.saved_states if _moment(s) <= _moment(base)),
            rejected=(),
        )
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
        request=plan.request,
        target=plan.saved_state_for(plan.source_node),
    )


def _can_be_repeated(
    inventories: Sequence[Inventory], plan: ResumePlan, newest: SavedState, world_size: int
) -> bool:
    """Return whether a proof is wanted, and the ranks are those that have computed the newest state."""
    if newest.tier != MEMORY or not all(each.wants_proof for each in inventories):
        return False
    if any(each.replayed_version >= newest.version for each in inventories):
        return False  # the replay of that state has ended without a verdict, or the state was not proved
    leader_by_node = {each.node: each.local_leader_rank for each in inventories}
    has_moved = any(
        state.writer_rank != leader_by_node[node] for node, state in plan.holders if state.owner_node == node
    )
    sizes = {each.last_world_size for each in inventories if each.last_generation == newest.generation}
    may_resize = all(each.proves_any_size for each in inventories)
    # Other ranks read other samples and draw other random numbers.
    return not has_moved and (may_resize or sizes == {world_size})


def _choose_base(states: Sequence[SavedState], newest: SavedState) -> SavedState | None:
    """Choose among the states of the source: within the epoch, and some steps back if that costs little."""
    earlier = [
        state
        for state in states
        if (state.tier, state.generation) == (MEMORY, newest.generation) and _moment(state) < _moment(newest)
    ]
    # Before the end of an epoch nothing is left to read: a script that uses its last batch there would fail.
    later = [*earlier, newest]
    usable = [one for one in earlier if not any(s.step == one.step and s.epoch > one.epoch for s in later)]
    near = [one for one in usable if newest.step - one.step <= MAX_PREFERRED_STEPS]
    within = [one for one in near if one.step_in_epoch]
    same_epoch = [one for one in within if one.epoch == newest.epoch]
    chosen = same_epoch or within or near
    return min(chosen, key=_moment) if chosen else max(usable, key=_moment, default=None)


def _moment(state: SavedState) -> Moment:
    return state.version, state.epoch


def judge(
    first_step: int,
    step: int,
    comparisons: Sequence[RankComparison],
    reason: str = "",
    *,
    within_epoch: bool = True,
    is_resized: bool = False,
) -> Verdict:
    """Judge the comparisons of all ranks that could compare. ``reason``: why the steps were not reached.

    For the others see `Verdict`. If the number of ranks has changed, only hyperparameters and schedules
    count, and only if the global batch has stayed.
    """
    verdict = Verdict(
        RESUMED if is_resized else PROVED,
        first_step,
        step,
        max((each.tensors for each in comparisons), default=0),
        max((each.values for each in comparisons), default=0),
        len(comparisons),
        within_epoch=within_epoch,
        is_batch_changed=any(each.is_batch_changed for each in comparisons),
    )
    if reason:
        return replace(verdict, kind=NOT_PROVED, reason=reason)
    worst = max(comparisons, key=lambda each: each.count, default=None)
    if worst is None:
        return verdict
    rounding = max(each.rounding for each in comparisons)
    verdict = replace(verdict, differences=worst.differences, count=worst.count, rounding=rounding)
    is_beyond = any(each.beyond_rounding for each in comparisons)
    if is_resized:
        return replace(verdict, kind=NOT_PROVED) if is_beyond and not verdict.is_batch_changed else verdict
    if not worst.count:
        return verdict
    return replace(verdict, kind=NOT_PROVED if is_beyond or rounding > MAX_ROUNDING else ROUNDING)


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
        text = f"the resume is proved: {what}, with the same bits in {compared}"
        more = (
            ""
            if verdict.within_epoch
            else ". That began with an epoch: a resume within one is still unproved"
        )
        return text + more
    named = "; ".join(f"{each.name}: {each.text}" for each in verdict.differences[:MAX_NAMED])
    more = f"; and {verdict.count - MAX_NAMED} more" if verdict.count > MAX_NAMED else ""
    if verdict.kind == RESUMED:
        text = f"it resumed with another number of ranks and trained on: {what}"
        if verdict.is_batch_changed:
            text += "; the global batch has changed with the ranks, so weights are not compared"
            hint = "it may follow from the number of steps in an epoch, which has changed"
            return f"{text}. {named}{more}: {hint}" if named else f"{text}; hyperparameters are the same"
        return (
            f"{text}; hyperparameters and schedules are the same; weights differ by {verdict.rounding:.1g} "
            "of what the steps changed, as they do by rounding, or by what each rank draws for dropout and "
            "augmentation"
        )
    if verdict.kind == ROUNDING:
        return (
            f"the resume is proved but for rounding: {what}, and {format_count(verdict.count, 'tensor')} "
            f"differ by at most {verdict.rounding:.1g} of what the steps changed: some operations of this "
            "script are not deterministic"
        )
    if verdict.reason:
        return f"THE RESUME IS NOT PROVED: {verdict.reason}"
    text = f"THE RESUME IS NOT PROVED: {what}, and the result differs: {named}{more}. {_find_cause(verdict)}"
    return to_printable(text, 2000)


def _find_cause(verdict: Verdict) -> str:
    """Return what usually causes such differences."""
    names = [each.name for each in verdict.differences if not each.is_tensor]
    if any(name.endswith(("/last_epoch", "/_step_count")) for name in names):
        return "Usual cause: scheduler.step() comes after run.step(): put it before."
    if len(names) == verdict.count and all(name.startswith("scheduler") for name in names):
        return (
            "Usual cause: a number that the script gives to scheduler.step(), such as the epoch's mean loss: "
            "in a resumed epoch it covers the batches after the resume only. Track its sum and count."
        )
    if any(name.startswith(HYPERPARAMETERS) for name in names):
        return (
            "Usual cause: a scheduler that er.resume() or er.epochs() was not given: pass it as scheduler=; "
            "or a learning rate or another hyperparameter that the script computes from a number of its own, "
            "such as the loop's index: compute it from run.position.step or run.position.epoch."
        )
    return (
        "Usual causes: something that the script keeps and no tracked object holds, such as an average, a "
        "counter, or parameters that only the optimizer has: pass it in track=; a second loader or a "
        "generator of your own: data=, er.seeded or track=; requires_grad changed while training."
    )
