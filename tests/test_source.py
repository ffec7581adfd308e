"""The choice of what to resume from: by table, and by properties over arbitrary inventories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.errors import NoValidCheckpointError
from elastic_resume.policy.source import Copy, Inventory, Rejected, choose, without


def node(name: str, rank: int, *copies: tuple[int, int], generation: int = 0, **more: object) -> Inventory:
    """An inventory whose copies, (generation, step), were written by this rank in its own directory."""
    own = tuple(Copy(name, g, s, rank) for g, s in copies)
    known = max([generation] + [g for g, _ in copies])
    return Inventory(name, rank, own, generation=known, **more)  # type: ignore[arg-type]


def test_nothing_anywhere_is_a_cold_start_in_generation_one() -> None:
    """No copy and nothing rejected: fresh, from rank 0."""
    plan = choose([node("a", 0), node("b", 1)], "auto")
    assert (plan.kind, plan.generation, plan.source_node, plan.step) == ("cold", 1, "a", 0)


def test_a_later_generation_beats_a_higher_step_of_an_abandoned_one() -> None:
    """Order is (generation, step): unsloth-zoo PR#782 resumed a stale higher step."""
    plan = choose([node("a", 0, (1, 900)), node("b", 1, (2, 30))], "auto")
    assert (plan.source_node, plan.source_generation, plan.step) == ("b", 2, 30)
    assert plan.lacking == ("a",)
    assert plan.generation == 3


def test_the_node_of_rank_zero_may_have_lost_its_disk() -> None:
    """Any holder can be the source."""
    plan = choose([node("a", 0), node("b", 1, (1, 5)), node("c", 2, (1, 5))], "auto")
    assert (plan.source_node, plan.source_rank, plan.lacking) == ("b", 1, ("a",))


def test_of_equal_copies_the_one_that_the_lowest_rank_wrote_is_the_source() -> None:
    """BatchNorm's buffers differ between ranks; the lowest rank's are the job's, wherever they are now."""
    first = Inventory("a", 0, (Copy("a", 1, 5, 2),))
    second = Inventory("b", 1, (Copy("b", 1, 5, 0),))
    assert choose([first, second], "auto").source_node == "b"


def test_a_node_reads_its_own_copy_before_a_peers() -> None:
    """On a shared file system rank 0 sees every directory."""
    seen = Inventory("a", 0, (Copy("b", 1, 5, 1), Copy("a", 1, 5, 0)))
    copy = choose([seen, node("b", 1, (1, 5))], "auto").copy_of("a")
    assert copy is not None
    assert copy.home == "a"


def test_copies_that_exist_and_cannot_be_read_are_never_forgotten() -> None:
    """All rejected: an error under auto and must that names them, not a fresh start."""
    bad = node("a", 0, rejected=(Rejected("a", "g000001-s0000000005", "torn", (1, 5)),))
    for mode in ("auto", "must"):
        with pytest.raises(NoValidCheckpointError, match=r"a/g000001-s0000000005: torn.*--resume never"):
            choose([bad, node("b", 1)], mode)


def test_an_older_valid_copy_is_taken_and_the_newer_bad_one_is_told() -> None:
    """What is older than the chosen copy is not told: it would not have been taken."""
    old = Rejected("a", "g000001-s0000000001", "torn", (1, 1))
    new = Rejected("a", "g000001-s0000000009", "torn", (1, 9))
    plan = choose([node("a", 0, rejected=(old, new)), node("b", 1, (1, 5))], "auto")
    assert (plan.step, plan.rejected) == (5, (new,))


def test_must_without_any_copy_is_an_error() -> None:
    """The text says what to check."""
    with pytest.raises(NoValidCheckpointError, match="--ckpt-dir and --rdzv-id"):
        choose([node("a", 0)], "must")


def test_never_sets_aside_what_is_older_than_this_start() -> None:
    """At the start of the job nobody has been in a world: every known generation is older."""
    plan = choose([node("a", 0, (3, 50), floor=3), node("b", 1)], "never")
    assert (plan.kind, plan.generation) == ("cold", 4)


def test_never_keeps_what_this_start_has_saved() -> None:
    """After a failure in generation 4 of a job started with never, its own checkpoint counts."""
    survivor = node("a", 0, (3, 50), (4, 10), floor=3, began=True)
    returned = node("b", 1, (3, 50), generation=4, floor=4)
    plan = choose([survivor, returned], "never")
    assert (plan.kind, plan.source_generation, plan.step) == ("checkpoint", 4, 10)


def test_never_does_not_forget_an_unreadable_copy_of_this_start() -> None:
    """The only copy of this start turns out corrupt: an error, as under auto."""
    bad = Rejected("a", "g000004-s0000000010", "digest", (4, 10))
    with pytest.raises(NoValidCheckpointError, match="none can be loaded"):
        choose([node("a", 0, (3, 50), floor=3, began=True, rejected=(bad,))], "never")


def test_a_given_path_serves_the_start_and_newer_own_copies_the_restarts() -> None:
    """--resume PATH: first the path, after a failure what was saved since."""
    given_copy = Copy("", 7, 70, 0)
    start = choose([node("a", 0, (3, 50), floor=3, given=given_copy), node("b", 1, floor=3)], "/ck/x")
    assert (start.kind, start.step, start.generation, start.lacking) == ("checkpoint", 70, 8, ("b",))
    later = [node("a", 0, (3, 50), (8, 75), floor=3, began=True, given=given_copy), node("b", 1, floor=8)]
    assert choose(later, "/ck/x").step == 75


def test_a_given_path_that_nobody_can_read_is_an_error_with_its_reason() -> None:
    """Never a fresh start instead."""
    reason = Rejected("a", "/ck/x", "no manifest.json")
    with pytest.raises(NoValidCheckpointError, match=r"/ck/x.*no manifest.json"):
        choose([node("a", 0, rejected=(reason,))], "/ck/x")


def test_lost_steps_are_those_finished_after_the_chosen_copy() -> None:
    """The board of the node that came furthest in the newest generation tells."""
    plan = choose(
        [
            node("a", 0, (1, 5), last_generation=1, last_step=8, last_world_size=3),
            node("b", 1, (1, 5), last_generation=1, last_step=7, last_world_size=3),
        ],
        "auto",
    )
    assert (plan.lost_steps, plan.previous_world_size) == (3, 3)


ORDERS = st.tuples(st.integers(1, 5), st.integers(0, 50))


@given(st.lists(st.lists(ORDERS, max_size=4), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_every_order_of_the_inventories_gives_the_same_plan(
    held: list[list[tuple[int, int]]], dice: object
) -> None:
    """Ranks gather in any order; the plan is one, newest, and partitions the nodes."""
    inventories = [node(f"n{i}", i, *copies) for i, copies in enumerate(held)]
    plan = choose(inventories, "auto")
    shuffled = list(inventories)
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(shuffled, "auto") == plan
    everything = [order for copies in held for order in copies]
    if not everything:
        assert plan.kind == "cold"
        return
    assert (plan.source_generation, plan.step) == max(everything)
    assert plan.generation > max(everything)[0]
    holders = {name for name, _ in plan.holders}
    assert holders | set(plan.lacking) == {one.node for one in inventories}
    assert not holders & set(plan.lacking)
    assert plan.source_node in holders


@given(st.lists(st.lists(ORDERS, max_size=3, unique=True), min_size=1, max_size=4))
def test_taking_out_each_failed_copy_ends_in_an_error_and_never_in_a_fresh_start(
    held: list[list[tuple[int, int]]],
) -> None:
    """However many copies fail their digest, one after the other, the job does not begin anew in silence."""
    inventories = [node(f"n{i}", i, *copies) for i, copies in enumerate(held)]
    if not any(held):
        return
    for _ in range(sum(len(copies) for copies in held)):
        plan = choose(inventories, "auto")
        assert plan.kind == "checkpoint"
        victim, copy = plan.holders[0]
        inventories = [without(one, copy, "x", "bad") if one.node == victim else one for one in inventories]
    with pytest.raises(NoValidCheckpointError):
        choose(inventories, "auto")
