"""Test the choice of the state to resume from: by table, and for arbitrary inventories."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.errors import ArchiveError, ArchiveErrorKind, ArchiveOutageError, NoValidCheckpointError
from elastic_resume.policy.resume_plan import (
    ARCHIVE,
    DISK,
    MAX_CHAIN_NODES,
    MEMORY,
    Inventory,
    RejectedState,
    ResumePlan,
    SavedState,
    Senders,
    choose_resume_plan,
    drop_foreign_states,
    judge_archive_error,
    plan_senders,
    reject_saved_state,
    split_archive_error,
)


def node(name: str, rank: int, *copies: tuple[int, int], generation: int = 0, **more: object) -> Inventory:
    """An inventory whose copies, (generation, step), were written by this rank in its own directory."""
    own = tuple(SavedState(name, g, s, rank) for g, s in copies)
    known = max([generation] + [g for g, _ in copies])
    return Inventory(name, rank, own, generation=known, **more)  # type: ignore[arg-type]


def test_no_saved_state_gives_cold_start_in_generation_one() -> None:
    """Rank 0 is the source."""
    plan = choose_resume_plan([node("a", 0), node("b", 1)], "auto")
    assert (plan.kind, plan.generation, plan.source_node, plan.step) == ("cold", 1, "a", 0)


def test_later_generation_beats_higher_step() -> None:
    """Order is (generation, step): unsloth-zoo PR#782 resumed a stale higher step."""
    plan = choose_resume_plan([node("a", 0, (1, 900)), node("b", 1, (2, 30))], "auto")
    assert (plan.source_node, plan.source_generation, plan.step) == ("b", 2, 30)
    assert plan.receiving_nodes == ("a",)
    assert plan.generation == 3


def test_source_is_a_holder_if_rank_zero_lost_its_disk() -> None:
    """Any holder can be the source."""
    plan = choose_resume_plan([node("a", 0), node("b", 1, (1, 5)), node("c", 2, (1, 5))], "auto")
    assert (plan.source_node, plan.source_rank, plan.receiving_nodes) == ("b", 1, ("a",))


def test_source_of_equal_states_is_lowest_writer_rank() -> None:
    """BatchNorm's buffers differ between ranks; the lowest rank's are the job's, wherever they are now."""
    first = Inventory("a", 0, (SavedState("a", 1, 5, 2),))
    second = Inventory("b", 1, (SavedState("b", 1, 5, 0),))
    assert choose_resume_plan([first, second], "auto").source_node == "b"


def test_node_reads_its_own_state_before_a_peers() -> None:
    """On a shared file system rank 0 sees every directory."""
    seen = Inventory("a", 0, (SavedState("b", 1, 5, 1), SavedState("a", 1, 5, 0)))
    copy = choose_resume_plan([seen, node("b", 1, (1, 5))], "auto").saved_state_for("a")
    assert copy is not None
    assert copy.owner_node == "a"


def test_only_rejected_states_raise() -> None:
    """All rejected: an error under auto and must that names them, not a fresh start."""
    bad = node("a", 0, rejected=(RejectedState("a", "g000001-s0000000005", "torn", (1, 5)),))
    for mode in ("auto", "must"):
        with pytest.raises(NoValidCheckpointError, match=r"a/g000001-s0000000005: torn.*--resume never"):
            choose_resume_plan([bad, node("b", 1)], mode)


def test_older_valid_state_is_chosen_and_newer_bad_one_listed() -> None:
    """A rejected state that is older than the chosen one is not listed."""
    old = RejectedState("a", "g000001-s0000000001", "torn", (1, 1))
    new = RejectedState("a", "g000001-s0000000009", "torn", (1, 9))
    plan = choose_resume_plan([node("a", 0, rejected=(old, new)), node("b", 1, (1, 5))], "auto")
    assert (plan.step, plan.rejected) == (5, (new,))


def test_must_without_saved_state_raises() -> None:
    """The text says what to check."""
    with pytest.raises(NoValidCheckpointError, match="--ckpt-dir and --rdzv-id"):
        choose_resume_plan([node("a", 0)], "must")


def test_recomputed_steps_count_from_chosen_state() -> None:
    """The node with the newest step counts."""
    plan = choose_resume_plan(
        [
            node("a", 0, (1, 5), last_generation=1, last_step=8, last_world_size=3),
            node("b", 1, (1, 5), last_generation=1, last_step=7, last_world_size=3),
        ],
        "auto",
    )
    assert (plan.recomputed_steps, plan.previous_world_size) == (3, 3)


ORDERS = st.tuples(st.integers(1, 5), st.integers(0, 50))


@given(st.lists(st.lists(ORDERS, max_size=4), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_order_of_inventories_does_not_change_the_plan(
    held: list[list[tuple[int, int]]], dice: object
) -> None:
    """Ranks gather in any order; the plan is one, newest, and partitions the nodes."""
    inventories = [node(f"n{i}", i, *copies) for i, copies in enumerate(held)]
    plan = choose_resume_plan(inventories, "auto")
    shuffled = list(inventories)
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose_resume_plan(shuffled, "auto") == plan
    everything = [order for copies in held for order in copies]
    if not everything:
        assert plan.kind == "cold"
        return
    assert (plan.source_generation, plan.step) == max(everything)
    assert plan.generation > max(everything)[0]
    holders = {name for name, _ in plan.holders}
    assert holders | set(plan.receiving_nodes) == {inventory.node for inventory in inventories}
    assert not holders & set(plan.receiving_nodes)
    assert plan.source_node in holders


@given(st.lists(st.lists(ORDERS, max_size=3, unique=True), min_size=1, max_size=4))
def test_rejecting_every_state_raises_instead_of_cold_start(
    held: list[list[tuple[int, int]]],
) -> None:
    """Each state may fail its digest."""
    inventories = [node(f"n{i}", i, *copies) for i, copies in enumerate(held)]
    if not any(held):
        return
    for _ in range(sum(len(copies) for copies in held)):
        plan = choose_resume_plan(inventories, "auto")
        assert plan.kind == "resumed"
        victim, copy = plan.holders[0]
        inventories = [
            reject_saved_state(item, copy, "x", "bad") if item.node == victim else item
            for item in inventories
        ]
    with pytest.raises(NoValidCheckpointError):
        choose_resume_plan(inventories, "auto")


# ---- what may not be passed over -----------------------------------------------------------------------


def refused(node_name: str, order: tuple[int, int], kind: str) -> RejectedState:
    """A copy that may not be loaded."""
    return RejectedState(node_name, f"g{order[0]}-s{order[1]}", f"is {kind}", order, kind)


@pytest.mark.parametrize("order", [(1, 9), (2, 1), (1, 5)])
def test_newer_format_is_never_replaced_by_older_state(order: tuple[int, int]) -> None:
    """It is valid: an upgrade brings its steps back. Not older than what can be read is enough."""
    newer = node("a", 0, (1, 3), rejected=(refused("a", order, "newer"),))
    for mode in ("auto", "must"):
        with pytest.raises(NoValidCheckpointError, match=r"Nothing was changed.*Upgrade.*--resume never"):
            choose_resume_plan([newer, node("b", 1, (1, 5))], mode)


def test_older_state_of_newer_format_does_not_matter() -> None:
    """The user went back to an older version and has trained since."""
    old = node("a", 0, (2, 9), rejected=(refused("a", (1, 50), "newer"),))
    assert choose_resume_plan([old], "auto").version == (2, 9)


@pytest.mark.parametrize("kind", ["foreign", "unreadable", "torn", "corrupt", "unlike"])
def test_unloadable_state_is_listed_and_older_one_chosen(kind: str) -> None:
    """The job goes on; the reason is in the plan."""
    bad = refused("a", (1, 9), kind)
    plan = choose_resume_plan([node("a", 0, (1, 5), rejected=(bad,))], "auto")
    assert (plan.step, plan.rejected) == (5, (bad,))


@pytest.mark.parametrize("kind", ["corrupt", "foreign", "unreadable"])
def test_plan_starts_after_every_known_generation(kind: str) -> None:
    """Names of rejected states give generations that no node knows any more; those of another run do not."""
    lost = Inventory(
        "a", 0, (SavedState("b", 6, 1, 0),), rejected=(refused("a", (7, 9), kind),), committed_generation=6
    )
    plan = choose_resume_plan([lost, node("b", 1)], "auto")
    assert plan.generation == (7 if kind == "foreign" else 8)


def test_missing_committed_checkpoints_raise() -> None:
    """They were removed, or something is not mounted. A wiped disk has forgotten this too."""
    had = node("a", 0, generation=4, committed_generation=3)
    with pytest.raises(NoValidCheckpointError, match=r"a: had checkpoints of this job.*--resume never"):
        choose_resume_plan([node("b", 1), had], "auto")
    assert choose_resume_plan([had, node("b", 1, (3, 7))], "auto").version == (3, 7)


def test_unreadable_state_raises_error_that_is_not_deterministic() -> None:
    """The error does not end the job at once, as one about proven damage does."""
    for kind, at_fault in (("unreadable", False), ("corrupt", True)):
        with pytest.raises(NoValidCheckpointError) as caught:
            choose_resume_plan([node("a", 0, rejected=(refused("a", (1, 5), kind),))], "auto")
        assert caught.value.is_deterministic is at_fault


KINDS = st.sampled_from(["newer", "foreign", "unreadable", "torn", "corrupt", "aside", "unlike"])


@given(
    st.lists(
        st.tuples(
            st.lists(ORDERS, max_size=3, unique=True),
            st.lists(st.tuples(ORDERS, KINDS), max_size=3),
            st.integers(0, 6),  # what its generation.json tells
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["auto", "must", "never"]),
)
def test_newer_format_never_leads_to_older_state(
    world: list[tuple[list[tuple[int, int]], list[tuple[tuple[int, int], str]], int]], mode: str
) -> None:
    """This holds for any states: with `never` they are all of this start."""
    inventories = [
        node(
            f"n{i}",
            i,
            *copies,
            generation=known,
            rejected=tuple(refused(f"n{i}", order, kind) for order, kind in bad),
        )
        for i, (copies, bad, known) in enumerate(world)
    ]
    try:
        plan = choose_resume_plan(inventories, mode)
    except NoValidCheckpointError:
        return
    newer = [order for _, bad, _ in world for order, kind in bad if kind == "newer"]
    assert all(order < plan.version for order in newer)
    assert plan.generation > plan.source_generation


# ---- tiers, and who sends to whom ------------------------------------------------------------------------


def test_memory_is_preferred_among_equal_states_only() -> None:
    """The tier decides between equals only."""
    both = Inventory("a", 0, (SavedState("a", 1, 5, 0), SavedState("a", 1, 5, 0, MEMORY)))
    assert choose_resume_plan([both], "auto").source_tier == MEMORY
    newer = Inventory("a", 0, (SavedState("a", 1, 6, 0), SavedState("a", 1, 5, 0, MEMORY)))
    plan = choose_resume_plan([newer], "auto")
    assert (plan.source_tier, plan.step) == (DISK, 6)


def test_rejected_snapshot_leaves_checkpoint_of_same_step() -> None:
    """They are two copies: one that turns out bad says nothing of the other."""
    snapshot = SavedState("a", 1, 5, 0, MEMORY)
    both = Inventory("a", 0, (SavedState("a", 1, 5, 0), snapshot))
    plan = choose_resume_plan([reject_saved_state(both, snapshot, "x", "bad")], "auto")
    assert (plan.source_tier, plan.step, len(plan.rejected)) == (DISK, 5, 1)


def test_lowest_writer_rank_beats_memory() -> None:
    """The source is the lowest writer; among copies of one writer, the one in memory."""
    disk, memory = (
        Inventory("a", 0, (SavedState("a", 1, 5, 0),)),
        Inventory("b", 1, (SavedState("b", 1, 5, 1, MEMORY),)),
    )
    assert choose_resume_plan([disk, memory], "auto").source_node == "a"
    same = Inventory("b", 1, (SavedState("b", 1, 5, 0, MEMORY),))
    assert choose_resume_plan([disk, same], "auto").source_node == "b"


def test_state_after_epoch_end_is_newer_than_its_last_step() -> None:
    """Of one step both may exist; nodes that hold the older one lack the newer."""
    last, done = SavedState("a", 1, 5, 0, MEMORY, epoch=0), SavedState("b", 1, 5, 1, MEMORY, epoch=1)
    plan = choose_resume_plan([Inventory("a", 0, (last,)), Inventory("b", 1, (done,))], "auto")
    assert (plan.source_node, plan.receiving_nodes) == ("b", ("a",))


def held(memory: int, disk: int, lacking: int) -> ResumePlan:
    """A plan with so many nodes of each kind; those with disks have the lowest ranks."""
    nodes = [Inventory(f"d{i}", i, (SavedState(f"d{i}", 1, 5, i),)) for i in range(disk)]
    nodes += [Inventory(f"m{i}", 50 + i, (SavedState(f"m{i}", 1, 5, 50 + i, MEMORY),)) for i in range(memory)]
    nodes += [Inventory(f"x{i}", 90 + i) for i in range(lacking)]
    return choose_resume_plan(nodes, "auto")


@pytest.mark.parametrize(
    ("memory", "disk", "lacking", "expected"),
    [
        (1, 0, 0, {}),
        (1, 0, 1, {"x0": "m0"}),
        (2, 0, 1, {"x0": "m0 m1"}),
        (2, 0, 2, {"x0": "m0 m1", "x1": "m1 m0"}),  # each begins with another holder
        (1, 0, 3, {"x0": "m0", "x1": "x0", "x2": "x1"}),  # a chain
        (2, 0, 5, {"x0": "m0 m1", "x1": "m1 m0", "x2": "x0", "x3": "x1", "x4": "x2"}),
        (1, 2, 2, {"x0": "m0", "x1": "x0"}),  # memory before disk
        (0, 2, 1, {"x0": "d0 d1"}),
    ],
)
def test_sources_are_all_holders_then_chains_of_receivers(
    memory: int, disk: int, lacking: int, expected: dict[str, str]
) -> None:
    """Each link carries the state once."""
    sources = plan_senders(held(memory, disk, lacking))
    assert {node: " ".join(planned.first) for node, planned in sources.items()} == expected


def test_substitutes_are_other_holders_and_earlier_receivers() -> None:
    """Disks come after memory, and near receivers before far ones."""
    sources = plan_senders(held(1, 1, 3))
    assert sources["x0"] == Senders(("m0",), ("d0",))
    assert sources["x2"] == Senders(("x1",), ("m0", "d0", "x0"))


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 100))
def test_sources_spread_without_circles(memory: int, disk: int, lacking: int) -> None:
    """A node waits for holders and earlier receivers only, and few nodes wait for it."""
    if memory + disk == 0:
        return
    plan = held(memory, disk, lacking)
    sources = plan_senders(plan)
    holders = {node for node, _ in plan.holders}
    assert tuple(sources) == plan.receiving_nodes
    depth = dict.fromkeys(holders, 0)
    for i, (node, planned) in enumerate(sources.items()):
        assert planned.first
        assert {*planned.first, *planned.substitutes} == holders | {*plan.receiving_nodes[:i]}
        assert not {*planned.first} & {*planned.substitutes}
        depth[node] = 1 + max(depth[other] for other in planned.first)
    most = 1 if lacking <= MAX_CHAIN_NODES * (memory or disk) else 2
    successors = Counter(first for planned in sources.values() for first in planned.first)
    assert all(count <= most for node, count in successors.items() if node not in holders)
    assert max(depth.values()) <= MAX_CHAIN_NODES


def test_cold_start_has_no_sources() -> None:
    """There is no copy."""
    assert plan_senders(choose_resume_plan([node("a", 0), node("b", 1)], "auto")) == {}


@pytest.mark.parametrize(
    ("tiers", "source", "holders"),
    [
        ({"a": [ARCHIVE]}, ("a", ARCHIVE), ["a"]),
        ({"a": [ARCHIVE, DISK]}, ("a", DISK), ["a"]),
        ({"a": [ARCHIVE], "b": [DISK]}, ("b", DISK), ["b"]),  # it sends faster than an archive
        ({"a": [ARCHIVE], "b": [MEMORY], "c": [DISK]}, ("b", MEMORY), ["b", "c"]),
    ],
)
def test_archive_is_read_only_for_what_no_node_holds(
    tiers: dict[str, list[str]], source: tuple[str, str], holders: list[str]
) -> None:
    """A newer archived state beats older ones of nodes, as in every tier."""
    nodes = ["a", "b", "c"]
    inventories = [
        Inventory(name, rank, tuple(SavedState(name, 1, 5, rank, tier) for tier in tiers.get(name, ())))
        for rank, name in enumerate(nodes)
    ]
    plan = choose_resume_plan(inventories, "auto")
    assert (plan.source_node, plan.source_tier) == source
    assert [name for name, _ in plan.holders] == holders
    newer = Inventory("d", 3, (SavedState("z", 1, 6, 0, ARCHIVE),))
    plan = choose_resume_plan([*inventories, newer], "auto")
    assert (plan.step, plan.source_tier, plan.owner_node) == (6, ARCHIVE, "z")
    assert plan.receiving_nodes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("kind", "waited_s", "end"),
    [
        (ArchiveErrorKind.UNAVAILABLE, 0, None),
        (ArchiveErrorKind.SLOW, 599, None),
        (ArchiveErrorKind.CUT, 599, None),
        (ArchiveErrorKind.UNAVAILABLE, 600, ArchiveOutageError),
        (ArchiveErrorKind.MISSING_BUCKET, 0, ArchiveError),
        (ArchiveErrorKind.FORBIDDEN, 0, ArchiveError),
        (ArchiveErrorKind.CREDENTIALS, 0, ArchiveError),
    ],
)
def test_start_waits_for_an_archive_only_if_waiting_may_mend_it(
    kind: ArchiveErrorKind, waited_s: float, end: type[ArchiveError] | None
) -> None:
    """What a person must mend ends the job at once, and for good; an outage is worth another start."""
    sentence = "s3://b/job: cannot list log: create it, or correct the address"
    error, (rest,) = split_archive_error(
        [node("a", 0, rejected=(RejectedState("a", "the archive", sentence, archive_error=kind),))]
    )
    assert error is not None
    assert rest.rejected == ()
    raised = judge_archive_error(error, waited_s, 600)
    assert type(raised) is (end or type(None))
    if raised is not None:
        assert raised.is_deterministic
        assert str(raised).count(sentence) == 1
        assert "resume never" not in str(raised)


@pytest.mark.parametrize(
    ("has_restarted", "own_generation", "tiers", "dropped"),
    [
        (True, 2, (MEMORY, ARCHIVE), True),
        (True, 3, (MEMORY, ARCHIVE), False),
        (True, 0, (MEMORY, ARCHIVE), False),
        (False, 2, (DISK, ARCHIVE), False),
        (True, 2, (DISK, DISK), False),
        (True, 2, (ARCHIVE, ARCHIVE), False),
    ],
)
def test_archived_state_of_another_job_is_dropped_by_a_job_that_trains(
    has_restarted: bool, own_generation: int, tiers: tuple[str, str], dropped: bool
) -> None:
    """Its generation is one that this job has not had. Without a state of its own, the job may take it."""
    own, other = SavedState("a", 2, 43, 0, tiers[0]), SavedState("b", 3, 22, 0, tiers[1])
    inventories = [
        Inventory("a", 0, (own, other), generation=3, own_generation=own_generation),
        Inventory(
            "c", 1, (), generation=3, own_generation=min(1, own_generation), has_restarted=has_restarted
        ),
    ]
    kept, foreign = drop_foreign_states(inventories)
    assert foreign == (other if dropped else None)
    assert kept[0].saved_states == ((own,) if dropped else (own, other))
    assert kept[0].generation == 3, "the next generation is newer than that of the other job"
