"""Test from which state a resume is proved, and what a comparison means: by table."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from elastic_resume.policy.proof import (
    MAX_PREFERRED_STEPS,
    NOT_PROVED,
    PROVED,
    RESUMED,
    ROUNDING,
    UNMEASURED,
    DifferingValue,
    RankComparison,
    describe,
    judge,
    plan_with_proof,
    summarize_ratios,
)
from elastic_resume.policy.resume_plan import DISK, MEMORY, Inventory, SavedState


def node(name: str, rank: int, *steps: int, generation: int = 3, epoch: int = 0) -> Inventory:
    """An inventory of a node that has taken part in ``generation`` with one rank of two."""
    states = tuple(SavedState(name, generation, step, rank, MEMORY, epoch=epoch) for step in steps)
    return Inventory(
        name,
        rank,
        states,
        generation=generation,
        last_generation=generation,
        last_world_size=2,
        last_step=max(steps, default=0),
        wants_proof=True,
    )


def start_of(*nodes: Inventory, world_size: int = 2) -> tuple[int, int | None]:
    """Return the step of the start, and that of the state to compute again."""
    plan = plan_with_proof(nodes, "auto", world_size)
    return plan.step, plan.target.step if plan.target else None


def test_proof_starts_at_an_earlier_state_of_the_source_node() -> None:
    """The source is the same as without a proof; no step counts as lost, and all other facts stay."""
    nodes = [node("a", 0, 9, 8, 7), node("b", 1, 9, 8, 7)]
    plan = plan_with_proof(nodes, "auto", 2)
    assert (plan.step, plan.target) == (7, nodes[0].saved_states[0])
    assert (plan.source_node, plan.receiving_nodes, plan.recomputed_steps, plan.generation) == ("a", (), 0, 4)
    without_a = [node("a", 0, 7), node("b", 1, 8, 7), node("c", 2, 8, 7)]
    plan = plan_with_proof([replace(each, last_world_size=3) for each in without_a], "auto", 3)
    assert (plan.step, plan.source_node, plan.source_rank) == (7, "b", 1)


@pytest.mark.parametrize(
    ("steps", "start"),
    [
        ((40, 39, 38), 38),
        ((40, 40 - MAX_PREFERRED_STEPS, 30), 40 - MAX_PREFERRED_STEPS),
        ((40, 30, 20), 30),
    ],
)
def test_replay_is_long_where_that_costs_little(steps: tuple[int, ...], start: int) -> None:
    """Within a few steps the earliest state is taken, else the latest before the newest."""
    assert start_of(node("a", 0, *steps), node("b", 1, *steps)) == (start, 40)


NEWEST = (node("a", 0, 9, 8), node("b", 1, 9, 8))
OLDER = node("a", 0, 8, generation=2)


@pytest.mark.parametrize(
    ("why", "nodes", "world_size", "unproved"),
    [
        ("one node has proved the script", (NEWEST[0], replace(NEWEST[1], wants_proof=False)), 2, ""),
        ("tried before", (NEWEST[0], replace(NEWEST[1], replayed_version=(3, 9))), 2, ""),
        ("another number of ranks", NEWEST, 3, ""),
        ("other ranks", tuple(replace(n, local_leader_rank=1 - n.local_leader_rank) for n in NEWEST), 2, ""),
        (
            "the newest state is on disk alone",
            tuple(replace(n, saved_states=(replace(n.saved_states[0], tier=DISK),)) for n in NEWEST),
            2,
            "",
        ),
        ("no earlier state", (node("a", 0, 9), node("b", 1, 9)), 2, "no earlier snapshot is in memory"),
        ("one node has the newest state", (NEWEST[0], node("b", 1, 8)), 2, "a alone holds this step"),
        (
            "the earlier state is of another generation, whose resume may have been as wrong",
            (
                replace(NEWEST[0], saved_states=NEWEST[0].saved_states[:1] + OLDER.saved_states),
                node("b", 1, 9),
            ),
            2,
            "no earlier snapshot is in memory",
        ),
    ],
)
def test_without_what_a_proof_needs_the_newest_state_is_resumed(
    why: str, nodes: tuple[Inventory, ...], world_size: int, unproved: str
) -> None:
    """As without a proof; who waits for a verdict is told."""
    assert start_of(*nodes, world_size=world_size) == (9, None), why
    plan = plan_with_proof(nodes, "auto", world_size)
    assert plan.unproved == unproved


def test_state_of_an_earlier_target_does_not_hinder_the_next_proof() -> None:
    """Each state is computed again once at most."""
    assert start_of(*(replace(each, replayed_version=(3, 8)) for each in NEWEST)) == (8, 9)


def test_fresh_node_receives_the_earlier_state() -> None:
    """It has none, and knows nothing of the job. It takes the rank of the lost one."""
    fresh = Inventory("c", 2, wants_proof=True)
    plan = plan_with_proof([*(replace(each, last_world_size=3) for each in NEWEST), fresh], "auto", 3)
    assert (plan.step, plan.receiving_nodes) == (8, ("c",))
    assert plan.target is not None


def test_no_replay_begins_where_an_epoch_has_nothing_left_to_read() -> None:
    """The state before the end of an epoch has the step of the one after it."""
    before, after = node("a", 0, 16, epoch=1), node("a", 0, 16, epoch=2)
    ends = replace(before, saved_states=after.saved_states + before.saved_states)
    assert start_of(ends, node("b", 1)) == (16, None)
    more = replace(before, saved_states=(*node("a", 0, 17, epoch=2).saved_states, *ends.saved_states))
    plan = plan_with_proof([more, node("b", 1, 17, 16, epoch=2)], "auto", 2)
    assert (plan.version, plan.holders[0][1].epoch) == ((3, 16), 2)
    steps = [replace(state, step_in_epoch=state.step - 15) for state in node("a", 0, 18, 17, 16).saved_states]
    begin = replace(node("a", 0, 15).saved_states[0], step_in_epoch=0)
    with_begin = replace(NEWEST[0], saved_states=(*steps, begin))
    assert start_of(with_begin, node("b", 1, 18)) == (16, 18), "a replay from the begin tells less"


# ---- verdicts ------------------------------------------------------------------------------------------

WEIGHT = DifferingValue("model/w", "3 of 4 elements, by up to 0.1 of their value", is_tensor=True)
RATE = DifferingValue("optimizer/param_groups/0/lr", "was 0.1, now 0.2", is_tensor=False)
SAME = RankComparison(14, 50)


@pytest.mark.parametrize(
    ("comparisons", "kind"),
    [
        ([SAME, SAME], PROVED),
        ([SAME, replace(SAME, differences=(WEIGHT,), count=1, rounding=1e-5)], ROUNDING),
        ([SAME, replace(SAME, differences=(WEIGHT,), count=1, rounding=2e-3)], NOT_PROVED),
        ([replace(SAME, differences=(WEIGHT,), count=1, rounding=UNMEASURED)], NOT_PROVED),
        (
            [replace(SAME, differences=(RATE,), count=1, beyond_rounding=True)],
            NOT_PROVED,
        ),
    ],
)
def test_verdict_follows_from_the_worst_rank(comparisons: list[RankComparison], kind: str) -> None:
    """Rounding is small beside what the steps changed, and touches floating point tensors only."""
    assert judge(7, 9, comparisons).kind == kind


@pytest.mark.parametrize(
    ("errors", "changes", "expected"),
    [
        ([1e-5], [1.0], 1e-5),
        ([1e-5, 1e-3], [1.0, 1.0], 1e-3),  # one tensor of two
        ([1e-5, 1e-7], [1e-5, 1.0], 1.0),  # a small tensor is not hidden by a large one
        ([1e-4] * 19 + [1e-3], [1.0] * 19 + [1e-3], 2.5e-4),  # one in twenty changes by rounding alone
        ([1.0, 1.0], [0.0, 1.0], UNMEASURED),
        ([math.nan], [1.0], UNMEASURED),
    ],
)
def test_differences_are_measured_by_what_the_steps_changed(
    errors: list[float], changes: list[float], expected: float
) -> None:
    """For nine tenths of the tensors, and for all together."""
    assert summarize_ratios(errors, changes) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(
    ("found", "kind", "text"),
    [
        (replace(SAME, rounding=0.3), RESUMED, "weights differ by 0.3"),
        (
            replace(SAME, differences=(RATE,), count=1, beyond_rounding=True, is_batch_changed=True),
            RESUMED,
            "lr: was 0.1, now 0.2: it may follow from the number of steps in an epoch",
        ),
        (
            replace(SAME, is_batch_changed=True),
            RESUMED,
            "weights are not compared; hyperparameters are the same",
        ),
        (replace(SAME, differences=(RATE,), count=1, beyond_rounding=True), NOT_PROVED, "run.position"),
    ],
)
def test_another_number_of_ranks_keeps_schedules_if_it_keeps_the_batch(
    found: RankComparison, kind: str, text: str
) -> None:
    """Weights differ by rounding and by what each rank draws."""
    verdict = judge(7, 9, [found], is_resized=True)
    assert verdict.kind == kind
    assert text in describe(verdict)


@pytest.mark.parametrize(
    ("differences", "named", "cause"),
    [
        ((replace(RATE, name="scheduler/last_epoch"),), "scheduler/last_epoch", "put it before"),
        ((RATE, WEIGHT), "optimizer/param_groups/0/lr: was 0.1, now 0.2; model/w: 3 of 4", "run.position"),
        ((WEIGHT,), "model/w: 3 of 4 elements", "a generator"),
    ],
)
def test_failed_proof_names_values_and_a_usual_cause(
    differences: tuple[DifferingValue, ...], named: str, cause: str
) -> None:
    """Hyperparameters stand first."""
    found = replace(SAME, differences=differences, count=9, beyond_rounding=True)
    text = describe(judge(7, 9, [found]))
    assert text.startswith("THE RESUME IS NOT PROVED: steps 8 to 9 were computed again")
    assert named in text
    assert "and 5 more" in text
    assert cause in text


def test_number_that_the_script_gives_its_scheduler_is_told_from_an_untracked_one() -> None:
    """The mean loss of an epoch is one; it changes nothing else if it is not read."""
    metric = replace(RATE, name="scheduler/metric")
    found = replace(SAME, differences=(metric,), count=1, beyond_rounding=True)
    assert "gives to scheduler.step(), such as the epoch's mean loss" in describe(judge(7, 9, [found]))
    assert "run.position" in describe(judge(7, 9, [replace(found, count=2)]))


def test_proof_says_how_much_was_computed_and_compared() -> None:
    """A change that acts later is not seen, so the number of steps matters."""
    assert describe(judge(8, 9, [SAME, SAME])) == (
        "the resume is proved: step 9 was computed again after the resume, with the same bits in 14 tensors "
        "and 50 other values on 2 ranks"
    )
    assert "the end of the epoch at step 9 was computed again" in describe(judge(9, 9, [SAME]))
    assert "a resume within one is still unproved" in describe(judge(8, 9, [SAME], within_epoch=False))
