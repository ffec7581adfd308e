"""Test that no incomplete slot is ever used, whichever process dies or races, and how slots take memory."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastic_resume import constants
from elastic_resume.agent.workers import supervisor
from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.snapshot import slot_pool, slots
from elastic_resume.snapshot.slot_pool import SlotPool
from elastic_resume.snapshot.slots import ControlBlock, SlotState, decode_snapshot_id, encode_snapshot_id
from elastic_resume.units import format_bytes

BYTES = 4096
PARTS = 2


@given(st.integers(1, (1 << 23) - 1), st.integers(0, (1 << 40) - 1), st.booleans())
def test_a_mark_is_its_generation_and_step(generation: int, step: int, over: bool) -> None:
    """One word of eight bytes, and never zero."""
    mark = encode_snapshot_id(generation, step, epoch_ended=over)
    assert decode_snapshot_id(mark) == (generation, step)
    assert 0 < mark < 1 << 64


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans()), min_size=2, max_size=2))
def test_marks_are_ordered_as_copies_are(pair: list[tuple[int, int, bool]]) -> None:
    """By generation first, then by step, then by whether the epoch was over."""
    (g1, s1, o1), (g2, s2, o2) = pair
    less = encode_snapshot_id(g1, s1, epoch_ended=o1) < encode_snapshot_id(g2, s2, epoch_ended=o2)
    assert less == (pair[0] < pair[1])


@pytest.mark.parametrize(("generation", "step"), [(0, 1), (1 << 23, 1), (1, -1), (1, 1 << 40)])
def test_what_does_not_fit_a_mark_is_refused(generation: int, step: int) -> None:
    """Rather than taken for another snapshot."""
    with pytest.raises(ValueError, match="does not fit"):
        encode_snapshot_id(generation, step)


def state(index: int, target: int, **words: int | bool) -> SlotState:
    """A slot that counts, if not said otherwise."""
    return SlotState(index, 1, BYTES, target, **{"complete": True, **words})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("why", "states", "chosen"),
    [
        ("nothing is there", [], None),
        ("an empty one first", [state(0, 5), state(1, 0, complete=False), state(2, 4)], 1),
        ("a torn one before an older whole one", [state(0, 5), state(1, 6, complete=False), state(2, 4)], 1),
        ("else the oldest", [state(0, 5), state(1, 6), state(2, 4)], 2),
        ("not the newest that counts", [state(0, 5), state(1, 9, pinned=9)], 0),
        ("not what the keeper reads", [state(0, 5), state(1, 6, pinned=6), state(2, 4, pinned=4)], 0),
        ("not what is to be committed", [state(0, 5), state(1, 6), state(2, 4, commit_requested=4)], 0),
        ("what is committed", [state(0, 5), state(1, 6), state(2, 4, commit_requested=4, committed=4)], 2),
        ("a wish for what lay there before is none", [state(0, 5), state(1, 4, commit_requested=3)], 1),
        ("two, one of them being read", [state(0, 5), state(1, 4, pinned=4)], None),
        ("two, one of them being compared", [state(0, 5), state(1, 4, soft_pinned=4)], None),
        (
            "what nobody reads before what is compared",
            [state(0, 5, soft_pinned=5), state(1, 6), state(2, 7)],
            1,
        ),
        (
            "what is compared, for want of others",
            [state(0, 4, pinned=4), state(1, 5, soft_pinned=5), state(2, 6)],
            1,
        ),
        (
            "not the newest, though it is compared",
            [state(0, 4, pinned=4), state(1, 5, pinned=5), state(2, 6, soft_pinned=6)],
            None,
        ),
        (
            "not what is compared and held",
            [state(0, 4, pinned=4), state(1, 5, pinned=5, soft_pinned=5), state(2, 6)],
            None,
        ),
        ("not the newest, though it is compared", [state(0, 4, pinned=4), state(1, 6, soft_pinned=6)], None),
        (
            "nor what is held too",
            [state(0, 4, pinned=4), state(1, 5, pinned=5, soft_pinned=5), state(2, 6)],
            None,
        ),
        ("the only one, when it is on disk", [state(0, 5, committed=5)], 0),
        ("the only one, before that", [state(0, 5)], None),
        ("the only one, torn", [state(0, 5, complete=False)], 0),
    ],
)
def test_which_slot_the_lead_takes(why: str, states: list[SlotState], chosen: int | None) -> None:
    """Never the newest whole one, nor one in use."""
    found = slots.choose_overwritable(states)
    assert (found.index if found is not None else None) == chosen, why


def test_the_keeper_commits_the_newest_that_is_wanted() -> None:
    """And nothing that is torn, or on disk already."""
    states = [
        state(0, 5, commit_requested=5),
        state(1, 7, commit_requested=7, complete=False),
        state(2, 6, commit_requested=6),
        state(3, 8),
    ]
    found = slots.next_to_commit(states)
    assert found is not None
    assert found.index == 2
    assert slots.next_to_commit([state(0, 5, commit_requested=5, committed=5)]) is None


# ---- racing --------------------------------------------------------------------------------------------


@dataclass
class Copying:
    """A snapshot under way: what the lead and each rank have still to write of it."""

    slot: slots.Slot
    mark: int
    left: list[list[int]]  # of each local rank, places that it has not written
    published: bool = False


@dataclass
class Reading:
    """A commit under way: the places read so far."""

    slot: slots.Slot
    mark: int
    seen: bytes = b""


class Race(RuleBasedStateMachine):
    """Workers, who may die at any store, and the keeper, at the grain of single stores and reads.

    Each snapshot fills its slot with one byte of its own, so a mixed one shows.
    """

    PLACES = 8

    def __init__(self) -> None:
        super().__init__()
        self.rack = SlotPool(3 * BYTES, log=lambda _: None)
        self.rack.reserve(BYTES)
        self.rack._create_slots(BYTES)
        self.by_index = {i: kept.slot for i, kept in self.rack._owned.items()}
        self.generation, self.step = 1, 0
        self.copying: Copying | None = None
        self.reading: Reading | None = None
        self.finished: list[int] = []

    def teardown(self) -> None:
        """Give the memory back."""
        self.by_index.clear()
        self.rack.close()

    @staticmethod
    def byte(mark: int) -> int:
        """The byte that stands for a snapshot."""
        return mark // 2 % 251 + 1

    @precondition(lambda self: self.copying is None)
    @rule(want=st.booleans())
    def begin(self, want: bool) -> None:
        """The lead takes a slot away."""
        chosen = slots.choose_overwritable(self.rack.control_block.read_slots())
        self.step += 1
        assume(chosen is not None)
        assert chosen is not None
        slot = self.by_index[chosen.index]
        mark = encode_snapshot_id(self.generation, self.step)
        slot.record.set("target", 0)
        slot.record.set("commit_requested", mark if want else 0)
        half = self.PLACES // 2
        self.copying = Copying(slot, mark, [list(range(half)), list(range(half, self.PLACES))])

    @precondition(lambda self: self.copying is not None and not self.copying.published)
    @rule()
    def publish(self) -> None:
        """The lead says where the snapshot goes."""
        assert self.copying is not None
        self.copying.slot.record.set("parts", PARTS)
        self.copying.slot.record.set("target", self.copying.mark)
        self.copying.published = True

    @precondition(lambda self: self.copying is not None and self.copying.published)
    @rule(rank=st.integers(0, PARTS - 1))
    def copy(self, rank: int) -> None:
        """A local rank stores one more place of its share; when all are, its mark."""
        copying = self.copying
        assert copying is not None
        if copying.left[rank]:
            copying.slot.memory[copying.left[rank].pop()] = self.byte(copying.mark)
        else:
            copying.slot.record.set_copied(rank, copying.mark)
        if copying.slot.record.complete_snapshot_id() == copying.mark:
            self.finished.append(copying.mark)
            self.copying = None

    @rule()
    def die(self) -> None:
        """All workers are killed; the next ones are of a later generation."""
        self.copying = None
        self.generation += 1

    @precondition(lambda self: self.reading is None)
    @rule()
    def hold(self) -> None:
        """The keeper begins to read what is wanted, or the newest."""
        states = self.rack.control_block.read_slots()
        chosen = slots.next_to_commit(states) or slots.newest_complete(states)
        assume(chosen is not None)
        assert chosen is not None
        slot = self.by_index[chosen.index]
        self.reading = Reading(slot, chosen.target)

    @precondition(lambda self: self.reading is not None)
    @rule()
    def say_held(self) -> None:
        """It says so: later than it looked, as the race wants it."""
        assert self.reading is not None
        self.reading.slot.record.set("pinned", self.reading.mark)

    @precondition(lambda self: self.reading is not None)
    @rule()
    def read(self) -> None:
        """It reads one more place; after the last it looks again, and commits or not."""
        reading = self.reading
        assert reading is not None
        if len(reading.seen) < self.PLACES:
            reading.seen += bytes([reading.slot.memory[len(reading.seen)]])
            return
        if reading.slot.record.complete_snapshot_id() == reading.mark:
            assert reading.seen == bytes([self.byte(reading.mark)]) * self.PLACES
            reading.slot.record.set("committed", reading.mark)
        reading.slot.record.set("pinned", 0)
        self.reading = None

    @invariant()
    def what_counts_is_whole(self) -> None:
        """The bytes of a slot that counts are those of its mark."""
        for one in self.rack.control_block.read_slots():
            if one.complete:
                slot = self.by_index[one.index]
                assert bytes(slot.memory[: self.PLACES]) == bytes([self.byte(one.target)]) * self.PLACES

    @invariant()
    def the_newest_is_never_lost(self) -> None:
        """Once a snapshot counts, it or a newer one does."""
        if self.finished:
            newest = slots.newest_complete(self.rack.control_block.read_slots())
            assert newest is not None
            assert newest.target >= self.finished[-1]


TestRace = Race.TestCase
TestRace.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


# ---- memory --------------------------------------------------------------------------------------------


@pytest.fixture
def said() -> list[str]:
    """What the rack told people."""
    return []


@pytest.fixture
def rack(said: list[str]) -> Iterator[SlotPool]:
    """A rack that may take three slots of four pages."""
    made = SlotPool(3 * 4 * BYTES, log=said.append)
    yield made
    made.close()


def fill(rack: SlotPool, index: int, mark: int) -> None:
    """Let a snapshot of that mark count in the slot."""
    record = rack.control_block.slot_record(index)
    record.set("parts", 1)
    record.set_copied(0, mark)
    record.set("target", mark)


@given(st.integers(1, 10**13), st.integers(0, 10**13), st.none() | st.integers(0, 10**13))
def test_a_budget_is_never_exceeded(size: int, free: int, allowed: int | None) -> None:
    """And what fits is used, up to three."""
    count = slot_pool.count_fitting_slots(size, free_bytes=free, allowed_bytes=allowed)
    limit = free // 2 if allowed is None else allowed
    assert 0 <= count <= slot_pool.SLOT_COUNT
    assert count * size <= limit
    assert count == slot_pool.SLOT_COUNT or (count + 1) * size > limit
    assert format_bytes(size) in slot_pool.describe_budget(
        count, size, free_bytes=free, allowed_bytes=allowed
    )


@pytest.mark.parametrize(("pages", "count"), [(1, 3), (4, 3), (5, 2), (6, 2), (7, 1), (12, 1), (13, 0)])
def test_as_many_slots_as_fit(pages: int, count: int, said: list[str], rack: SlotPool) -> None:
    """Three, two, one or none, and it is said which."""
    assert rack.reserve(pages * BYTES) == count
    assert len(said) == 1
    assert ("none" if count == 0 else f"{count} slot") in said[0]
    rack._create_slots(pages * BYTES)
    assert len(rack.control_block.read_slots()) == count
    assert len(said) == 1


def test_a_larger_layout_keeps_the_newest_snapshot(rack: SlotPool) -> None:
    """The others make room at once; that one when something newer counts."""
    rack.reserve(BYTES)
    rack._create_slots(BYTES)
    for index in range(3):
        fill(rack, index, encode_snapshot_id(1, index + 1))
    rack.reserve(2 * BYTES)
    rack._create_slots(2 * BYTES)
    states = rack.control_block.read_slots()
    assert sorted(one.capacity for one in states) == [BYTES] + [2 * BYTES] * 3
    newest = slots.newest_complete(states)
    assert newest is not None
    assert (newest.capacity, decode_snapshot_id(newest.target)) == (BYTES, (1, 3))
    larger = next(one for one in states if one.capacity > BYTES)
    fill(rack, larger.index, encode_snapshot_id(1, 4))
    rack._create_slots(2 * BYTES)
    assert [one.capacity for one in rack.control_block.read_slots()] == [2 * BYTES] * 3


def test_a_larger_layout_gets_its_slots_one_after_the_other_where_memory_is_scarce(rack: SlotPool) -> None:
    """Two of five pages fit, but not beside what still counts: the second comes when that is superseded."""
    rack.reserve(3 * BYTES)
    fill(rack, 0, encode_snapshot_id(1, 1))
    assert rack.reserve(5 * BYTES) == 2
    assert sorted(one.capacity // BYTES for one in rack.control_block.read_slots()) == [3, 5]
    larger = next(one for one in rack.control_block.read_slots() if one.capacity == 5 * BYTES)
    fill(rack, larger.index, encode_snapshot_id(1, 2))
    assert rack.reserve(5 * BYTES) == 2
    assert [one.capacity // BYTES for one in rack.control_block.read_slots()] == [5, 5]


def test_memory_comes_from_the_budget_and_goes_back() -> None:
    """No slot, file or mapping is left."""
    gc.collect()

    def files() -> int:  # of racks: what other tests have left may open and close others meanwhile
        count = 0
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += "memfd:elastic_resume" in str(entry.readlink())
        return count

    before = files()
    rack = SlotPool(3 << 20, log=lambda _: None)
    rack.reserve(1 << 20)
    rack._create_slots(1 << 20)
    assert files() == before + 2 * 4  # a mapping holds a descriptor of its own
    rack.close()
    rack.close()
    assert rack.reserve(BYTES) == 0  # a worker of the last moment asks
    with pytest.raises(ValueError, match="slots of this node are closed"):
        rack.discard(0)
    assert files() == before


def test_who_needs_less_than_there_is_hears_nothing_new(rack: SlotPool, said: list[str]) -> None:
    """At each restart a resume asks for what the copy needs, and training for what the state may come to."""
    for pages in (4, 3, 4):
        rack._create_slots(pages * BYTES)
    assert len(said) == 1
    rack._create_slots(5 * BYTES)
    assert "2 slots" in said[-1]


@pytest.mark.parametrize("part", ["header", "static", "dynamic"])
def test_a_snapshot_that_says_other_than_what_was_written_gives_no_notes(rack: SlotPool, part: str) -> None:
    """One flipped bit, in what says how to read the image or in the image's own header."""
    rack.reserve(4 * BYTES)
    slot, layout = rack._owned[0].slot, Layout.build([TensorSpec("model/w", "U8", (9,))])
    for _ in range(2):  # the second time the layout is there already
        slot.write_metadata(layout.header, layout.total_bytes, b"static", b"dynamic", 7)
        assert slot.read_metadata() == (b"static", b"dynamic")
    slot.memory[20 if part == "header" else slot.record.get(f"{part}_offset")] ^= 4
    with pytest.raises(ValueError, match="does not match its digest"):
        slot.read_metadata()


def test_a_slot_cannot_be_cut_off_under_its_users(rack: SlotPool) -> None:
    """That would be a SIGBUS in whoever copies."""
    rack.reserve(BYTES)
    descriptor = rack.slot_descriptor(0, rack.control_block.slot_record(0).get("serial"))
    assert descriptor is not None
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)


def test_words_that_cannot_be_true_reach_nothing(rack: SlotPool) -> None:
    """A slot whose words speak of more than there is gives no bytes."""
    rack.reserve(BYTES)
    slot = rack._owned[0].slot
    slot.record.set("image_bytes", 1 << 60)
    with pytest.raises(ValueError, match="outside a slot of"):
        slot.image()
    slot.record.set("static_offset", (1 << 64) - 1)
    with pytest.raises(ValueError, match="outside a slot of"):
        slot.read_metadata()


def test_a_guard_waits_for_a_copy_and_not_for_one_that_may_never_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A local rank whose lead is dead waits to hear where to copy: to wait for it would cost two seconds."""
    descriptor = ControlBlock.create()
    control = ControlBlock(descriptor)
    monkeypatch.setenv(constants.ENV_SLOTS, f"/proc/{os.getpid()}/fd/{descriptor}")
    monkeypatch.setenv(supervisor.ENV_LOCAL_RANK, "1")
    copying, mark = supervisor.SnapshotCopyMonitor(), slots.encode_snapshot_id(1, 1)
    seen = []
    for waits in (None, True, False):
        if waits is not None:
            control.set_copying(1, mark, awaiting_slot=waits)
        seen.append(
            (copying.should_wait(0.0, 100.0), control.is_copying_older([1], slots.encode_snapshot_id(1, 2)))
        )
    assert seen == [(False, False), (False, True), (True, True)]
    control.close()
    os.close(descriptor)


# ---- processors that reorder ---------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "ppc64le", "riscv64"])
def test_where_stores_may_be_reordered_a_barrier_lies_between_them(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two accesses of the words; what each barrier finds stored is told."""
    found: list[int] = []
    descriptor = ControlBlock.create()
    monkeypatch.setattr(slots, "ARCHITECTURE", "x86_64")
    plain = ControlBlock(descriptor)
    monkeypatch.setattr(slots, "ARCHITECTURE", machine)
    monkeypatch.setattr(slots, "barrier", lambda: found.append(plain.slot_record(0).get("target")))
    control = ControlBlock(descriptor)
    os.close(descriptor)
    record = control.slot_record(0)
    for value in (7, 8):
        record.set("target", value)
        assert record.get("target") == value
    seen = found.copy()
    control.set("decided_id", 8)
    control.set_copying(0, 8)
    record.set_copied(0, 8)
    record.set("parts", 1)
    assert record.complete_snapshot_id() == 8
    assert not control.is_copying_older([0], 8)
    accesses = 10  # `counts` has three
    if machine == "x86_64":
        assert found == []
    else:
        # Around each of: store 7, read it, store 8, read it.
        assert seen == [0, 7, 7, 7, 7, 8, 8, 8]
        assert len(found) - len(seen) == 2 * (accesses - 2)
    for one in (control, plain):
        one.close()


def test_a_barrier_holds_up_nobody() -> None:
    """Any number of threads may pass one at the same time."""
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(slots.barrier) for _ in range(4000)]:
            done.result(60)
