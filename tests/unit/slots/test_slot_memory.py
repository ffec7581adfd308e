"""Test that no incomplete slot is ever used, whichever process dies or races, and how slots take memory."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from elastic_resume import constants, linux, shared_page
from elastic_resume.agent.workers import supervisor
from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.errors import CorruptError, MachineError
from elastic_resume.slots import slot_memory, slot_pool
from elastic_resume.slots.slot_memory import ControlBlock, SlotState, decode_snapshot_id, encode_snapshot_id
from elastic_resume.slots.slot_pool import SlotPool
from elastic_resume.units import format_bytes
from tests.support.processes import wait_for
from tests.support.snapshot_samples import LAYOUT, SLOT_BYTES, write_snapshot

BYTES = 4096


@given(st.integers(1, (1 << 22) - 1), st.integers(0, (1 << 40) - 1), st.booleans())
def test_snapshot_id_decodes_to_generation_and_step(generation: int, step: int, over: bool) -> None:
    """An id is one word of 8 bytes, and never zero."""
    snapshot_id = encode_snapshot_id(generation, step, is_epoch_over=over)
    assert decode_snapshot_id(snapshot_id) == (generation, step)
    assert 0 < snapshot_id < 1 << 64


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans()), min_size=2, max_size=2))
def test_snapshot_ids_sort_by_generation_step_and_epoch_end(pair: list[tuple[int, int, bool]]) -> None:
    """Greater is newer."""
    (g1, s1, o1), (g2, s2, o2) = pair
    less = encode_snapshot_id(g1, s1, is_epoch_over=o1) < encode_snapshot_id(g2, s2, is_epoch_over=o2)
    assert less == (pair[0] < pair[1])


@pytest.mark.parametrize(("generation", "step"), [(0, 1), (1 << 22, 1), (1, -1), (1, 1 << 40)])
def test_snapshot_id_refuses_values_out_of_range(generation: int, step: int) -> None:
    """They could collide with another snapshot's id."""
    with pytest.raises(ValueError, match="does not fit"):
        encode_snapshot_id(generation, step)


WORDS = {"p": "pinned", "s": "soft_pinned", "r": "commit_requested", "c": "committed"}


def parse_states(text: str) -> list[SlotState]:
    """Parse slots such as ``5 -6 4rc``: snapshot 5, an incomplete 6, and 4, requested and committed."""
    states = []
    for index, word in enumerate(text.split()):
        snapshot_id = int(word.strip("-psrc"))
        fields = {name: snapshot_id for letter, name in WORDS.items() if letter in word}
        states.append(SlotState(index, 1, BYTES, snapshot_id, complete="-" not in word, **fields))
    return states


@pytest.mark.parametrize(
    ("reason", "states", "chosen"),
    [
        ("there is no slot", "", None),
        ("an empty slot first", "5 -0 4", 1),
        ("a torn one before an older complete one", "5 -6 4", 1),
        ("else the oldest", "5 6 4", 2),
        ("not the newest complete one", "5 9p", 0),
        ("not a pinned one", "5 6p 4p", 0),
        ("not one that needs a commit", "5 6 4r", 0),
        ("a committed one", "5 6 4rc", 2),
        ("two slots, one of them pinned", "5 4p", None),
        ("two slots, one of them soft-pinned", "5 4s", None),
        ("an unpinned one before a soft-pinned one", "5s 6 7", 1),
        ("a soft-pinned one if there is no other", "4p 5s 6", 1),
        ("of three, not the newest, though only soft-pinned", "4p 5p 6s", None),
        ("of two, not the newest, though only soft-pinned", "4p 6s", None),
        ("not one that is pinned and soft-pinned", "4p 5ps 6", None),
        ("the only one, once committed", "5c", 0),
        ("not the only one before its commit", "5", None),
        ("the only one, if torn", "-5", 0),
    ],
)
def test_choose_overwritable_keeps_newest_and_used_slots(
    reason: str, states: str, chosen: int | None
) -> None:
    """See each case."""
    found = slot_memory.choose_overwritable(parse_states(states))
    assert (found.index if found is not None else None) == chosen, reason


def test_commit_request_for_earlier_snapshot_does_not_protect_slot() -> None:
    """The slot has been overwritten since."""
    newest, older = parse_states("5 4")
    assert slot_memory.choose_overwritable([newest, replace(older, commit_requested=3)]) is not None


@pytest.mark.parametrize(("states", "index"), [("5r -7r 6r 8", 2), ("5rc", None)])
def test_next_to_commit_is_newest_requested_slot(states: str, index: int | None) -> None:
    """Torn and committed slots are skipped."""
    found = slot_memory.next_to_commit(parse_states(states))
    assert (found.index if found is not None else None) == index


# ---- memory --------------------------------------------------------------------------------------------


@pytest.fixture
def pool(caplog: pytest.LogCaptureFixture) -> Iterator[SlotPool]:
    """Yield a pool that may take three slots of four pages."""
    caplog.set_level("DEBUG")
    new_pool = SlotPool(3 * 4 * BYTES)
    yield new_pool
    new_pool.close()


def capacities(pool: SlotPool) -> list[int]:
    """Return the pages of each slot."""
    return sorted(state.capacity // BYTES for state in pool.control_block.read_slots())


def complete_slot(pool: SlotPool, index: int, snapshot_id: int) -> None:
    """Make a snapshot with that id complete in the slot."""
    slot = pool._owned[index].slot
    assert slot.take(snapshot_id)
    slot.record.set_copied(0, snapshot_id)
    slot.announce(snapshot_id)


@given(st.integers(1, 10**13), st.integers(0, 10**13), st.none() | st.integers(0, 10**13))
def test_slot_count_uses_budget_but_never_exceeds_it(size: int, free: int, allowed: int | None) -> None:
    """There are at most three slots."""
    count = slot_pool.count_fitting_slots(size, free_bytes=free, allowed_bytes=allowed)
    limit = free // 2 if allowed is None else allowed
    assert 0 <= count <= slot_pool.SLOT_COUNT
    assert count * size <= limit
    assert count == slot_pool.SLOT_COUNT or (count + 1) * size > limit
    assert format_bytes(size) in slot_pool.describe_budget(
        count, size, free_bytes=free, allowed_bytes=allowed
    )


def test_reserve_of_first_slot_does_not_wait_for_further_slots(
    monkeypatch: pytest.MonkeyPatch, pool: SlotPool
) -> None:
    """A resume begins to read while the other slots are still being created."""
    create, may_continue = slot_memory.create_memory_file, threading.Event()

    def create_first_only(name: str, size: int, *, allocate: bool) -> int:
        if pool.control_block.read_slots():
            may_continue.wait()
        return create(name, size, allocate=allocate)

    monkeypatch.setattr(slot_memory, "create_memory_file", create_first_only)
    pool.reserve_in_background(BYTES)
    with ThreadPoolExecutor(1) as executor:
        try:
            wait_for(lambda: bool(capacities(pool)), "the first slot")
            assert executor.submit(pool.reserve, BYTES, all_now=False).result(timeout=30) == 1
        finally:
            may_continue.set()
    wait_for(lambda: len(capacities(pool)) == slot_pool.SLOT_COUNT, "the other slots")


@pytest.mark.parametrize(("pages", "count"), [(1, 3), (4, 3), (5, 2), (6, 2), (7, 1), (12, 1), (13, 0)])
def test_reserve_creates_as_many_slots_as_fit(
    pages: int, count: int, caplog: pytest.LogCaptureFixture, pool: SlotPool
) -> None:
    """One line says how many there are."""
    assert pool.reserve(pages * BYTES) == count
    assert len(caplog.messages) == 1
    assert ("none" if count == 0 else f"{count} slot") in caplog.messages[0]
    assert len(pool.control_block.read_slots()) == count


def test_larger_slots_replace_all_but_newest_snapshot(pool: SlotPool) -> None:
    """The newest one goes when a newer one is complete."""
    pool.reserve(BYTES)
    for index in range(3):
        complete_slot(pool, index, encode_snapshot_id(1, index + 1))
    pool.reserve(2 * BYTES)
    assert capacities(pool) == [1, 2, 2, 2]
    states = pool.control_block.read_slots()
    newest = slot_memory.newest_complete(states)
    assert newest is not None
    assert (newest.capacity, decode_snapshot_id(newest.snapshot_id)) == (BYTES, (1, 3))
    larger = next(state for state in states if state.capacity > BYTES)
    complete_slot(pool, larger.index, encode_snapshot_id(1, 4))
    pool.reserve(2 * BYTES)
    assert capacities(pool) == [2, 2, 2]


def test_larger_slots_are_created_one_by_one_if_memory_is_scarce(pool: SlotPool) -> None:
    """Two of five pages fit, but not beside the newest snapshot: the second follows later."""
    pool.reserve(3 * BYTES)
    complete_slot(pool, 0, encode_snapshot_id(1, 1))
    assert pool.reserve(5 * BYTES) == 2
    assert capacities(pool) == [3, 5]
    larger = next(state for state in pool.control_block.read_slots() if state.capacity == 5 * BYTES)
    complete_slot(pool, larger.index, encode_snapshot_id(1, 2))
    assert pool.reserve(5 * BYTES) == 2
    assert capacities(pool) == [5, 5]


def test_large_slot_for_transfer_gets_memory_after_its_creation(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread allocates it, and its writer populates it. On an older kernel it has its memory at once."""
    monkeypatch.setattr(slot_memory, "SMALL_SLOT_BYTES", BYTES)
    allocate, reserved = slot_memory.allocate_memory_file, threading.Event()

    def allocate_later(descriptor: int, size: int) -> None:
        if slot_memory.can_populate_pages():
            assert reserved.wait(30)
        allocate(descriptor, size)

    monkeypatch.setattr(slot_memory, "allocate_memory_file", allocate_later)

    def allocated_pages(capacity: int) -> list[int]:
        found = [state for state in pool.control_block.read_slots() if state.capacity == capacity]
        descriptors = [pool.slot_descriptor(state.index, state.serial) for state in found]
        return [os.fstat(d).st_blocks * 512 // BYTES for d in descriptors if d is not None]

    pool.reserve(2 * BYTES, all_now=False)
    assert allocated_pages(2 * BYTES) == [0]
    state = pool.control_block.read_slots()[0]
    descriptor = pool.slot_descriptor(state.index, state.serial)
    assert descriptor is not None
    slot = slot_memory.Slot(
        descriptor, state.capacity, state.serial, pool.control_block.slot_record(state.index)
    )
    slot_memory.populate_pages(slot.memory[:1])
    assert allocated_pages(2 * BYTES) == [1]
    slot.populate()
    assert allocated_pages(2 * BYTES) == [2]
    pool.reserve(4 * BYTES, all_now=False)
    assert allocated_pages(4 * BYTES) == [0]
    reserved.set()
    wait_for(lambda: allocated_pages(4 * BYTES) == [4], "the slot's memory")
    monkeypatch.setattr(slot_memory, "can_populate_pages", lambda: False)
    pool.reserve(5 * BYTES, all_now=False)
    assert allocated_pages(5 * BYTES) == [5]


def test_populating_pages_without_memory_raises_machine_error() -> None:
    """A store there would end the process with SIGBUS."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, BYTES)
    memory = memoryview(mmap.mmap(descriptor, BYTES))
    os.ftruncate(descriptor, 0)
    os.close(descriptor)
    with pytest.raises(MachineError, match="Bad address"):
        slot_memory.populate_pages(memory)


def count_slot_descriptors() -> int:
    """Count this process's descriptors of slots; other threads may open and close others meanwhile."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "memfd:elastic_resume" in str(entry.readlink())
    return count


def test_close_frees_all_slots() -> None:
    """No descriptor or mapping is left."""
    gc.collect()
    before = count_slot_descriptors()
    pool = SlotPool(3 << 20)
    pool.reserve(1 << 20)
    assert count_slot_descriptors() == before + 2 * 4  # a mapping holds a descriptor of its own
    pool.close()
    pool.close()
    assert pool.reserve(BYTES) == 0  # a worker may ask while the agent ends
    with pytest.raises(ValueError, match="slots of this node are closed"):
        pool.control_block.read_slots()
    assert count_slot_descriptors() == before


@pytest.mark.parametrize(("hard", "pins"), [(True, (7, 0)), (False, (0, 7))])
def test_pin_is_stored_by_its_kind_until_the_last_reader_ends(
    hard: bool, pins: tuple[int, int], pool: SlotPool
) -> None:
    """A slot that has been replaced is not pinned, and has no descriptor."""
    pool.reserve(BYTES)
    state = replace(pool.control_block.read_slots()[0], snapshot_id=7)
    record = pool.control_block.slot_record(state.index)

    def stored() -> tuple[int, int]:
        return record.get("pinned"), record.get("soft_pinned")

    with pool.pin(state, hard=hard):
        with pool.pin(state, hard=hard):
            assert stored() == pins
        assert stored() == pins
    assert stored() == (0, 0)
    with pool.pin(replace(state, serial=state.serial + 1)) as slot:
        assert (slot, stored()) == (None, (0, 0))
    assert pool.slot_descriptor(state.index, state.serial + 1) is None
    assert pool.slot_descriptor(slot_memory.MAX_SLOTS, state.serial) is None


def test_smaller_request_logs_nothing(pool: SlotPool, caplog: pytest.LogCaptureFixture) -> None:
    """At each restart, a resume requests slots for its image, and training requests larger ones."""
    for pages in (4, 3, 4):
        pool.reserve(pages * BYTES)
    assert len(caplog.messages) == 1
    pool.reserve(5 * BYTES)
    assert "2 slots" in caplog.messages[-1]


@pytest.mark.parametrize("part", ["header", "static", "dynamic"])
def test_damaged_header_or_metadata_is_refused(pool: SlotPool, part: str) -> None:
    """One bit is flipped."""
    pool.reserve(4 * BYTES)
    slot, layout = pool._owned[0].slot, Layout.build([TensorSpec("model/w", "U8", (9,))])
    for _ in range(2):  # the second time the layout is there already
        slot.write_metadata(layout.header, layout.total_bytes, b"static", b"dynamic", 7)
        assert slot.read_metadata() == (b"static", b"dynamic")
    slot.memory[20 if part == "header" else slot.record.get(f"{part}_offset")] ^= 4
    with pytest.raises(ValueError, match="does not match its digest"):
        slot.read_metadata()


def test_slot_file_cannot_be_truncated(pool: SlotPool) -> None:
    """Truncation would raise SIGBUS in the processes that map it."""
    pool.reserve(BYTES)
    descriptor = pool.slot_descriptor(0, pool.control_block.slot_record(0).get("serial"))
    assert descriptor is not None
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)


def test_offsets_outside_slot_are_refused(pool: SlotPool) -> None:
    """Damaged words never lead outside the mapping."""
    pool.reserve(BYTES)
    slot = pool._owned[0].slot
    slot.record.set("image_bytes", 1 << 60)
    with pytest.raises(ValueError, match="outside a slot of"):
        slot.image()
    slot.record.set("static_offset", (1 << 64) - 1)
    with pytest.raises(ValueError, match="outside a slot of"):
        slot.read_metadata()


def test_metadata_without_room_is_refused(pool: SlotPool) -> None:
    """It would reach into memory behind the slot."""
    pool.reserve(4 * BYTES)
    slot = pool._owned[0].slot
    slot.write_metadata(b"", BYTES, b"{}", bytes(2 * BYTES), 7)
    with pytest.raises(ValueError, match="no room for 8193 bytes at 8192"):
        slot.write_metadata(b"", BYTES, b"{}", bytes(2 * BYTES + 1), 7)


def test_metadata_of_another_snapshot_invalid_or_too_long_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests match each time."""
    with contextlib.closing(SlotPool(SLOT_BYTES)) as new_pool:
        new_pool.reserve(SLOT_BYTES)
        slot = new_pool._owned[0].slot
        snapshot_id = write_snapshot(slot, 5)
        assert slot.read_snapshot(snapshot_id)[0].version == (1, 5)
        with pytest.raises(CorruptError, match=r"its metadata is of \(1, 5\)"):
            slot.read_snapshot(encode_snapshot_id(1, 6))
        monkeypatch.setattr(slot_memory, "MAX_MANIFEST_BYTES", 100)
        with pytest.raises(CorruptError, match="the limit is 100"):
            slot.read_snapshot(snapshot_id)
        slot.write_metadata(LAYOUT.header, LAYOUT.total_bytes, b"[]", b"{}", 8)
        with pytest.raises(CorruptError, match="its metadata is invalid"):
            slot.read_snapshot(snapshot_id)


def test_older_kernel_allocates_at_once_and_seals_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses a flag and an advice that it does not know, as an older one refuses ours."""
    monkeypatch.setattr(linux, "MFD_NOEXEC_SEAL", 1 << 20)
    monkeypatch.setattr(slot_memory, "_MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(slot_memory, "can_populate_pages", slot_memory.can_populate_pages.__wrapped__)
    descriptor = slot_memory.create_memory_file("test", BYTES, allocate=False)
    assert os.fstat(descriptor).st_blocks * 512 == BYTES
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 2 * BYTES)
    slot_memory.populate_pages(memoryview(mmap.mmap(descriptor, BYTES)))  # the first store will map it
    os.close(descriptor)


def test_supervisor_waits_for_copy_but_not_for_rank_awaiting_slot(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without a slot may never copy, if its leader is dead; waiting for it would cost two seconds."""
    monkeypatch.setenv(constants.ENV_SLOTS, pool.control_path)
    monkeypatch.setenv(supervisor.ENV_LOCAL_RANK, "1")
    monitor, older, newer = (
        supervisor.SnapshotCopyMonitor(),
        encode_snapshot_id(1, 1),
        encode_snapshot_id(1, 2),
    )
    for copying_id, awaiting_slot, expected in (
        (0, False, (False, False)),
        (older, True, (False, True)),
        (older, False, (True, True)),
    ):
        pool.control_block.set_copying(1, copying_id, awaiting_slot=awaiting_slot)
        is_older = pool.control_block.is_copying([1], newer)
        assert (monitor.is_copying(), is_older) == expected


@pytest.mark.parametrize(
    ("static", "dynamic", "merged"),
    [
        ({"p": 1}, {"q": 2}, {"p": 1, "q": 2}),
        ({"$": "tensor", "p": 1}, {"q": 2}, {"q": 2}),
        ({"p": 1}, {"$": "tensor"}, {"$": "tensor"}),
        ([{"p": 1}, 1], [{"q": 2}, 2], [{"p": 1, "q": 2}, 2]),
        ([{"p": 1}], [{"q": 2}, 2], [{"q": 2}, 2]),
        ({"x": {"x": {"p": 1}}}, {"x": {"x": {"q": 2}}}, {"x": {"x": {"p": 1, "q": 2}}}),
        ({"x": {"x": {"x": {"p": 1}}}}, {"x": {"x": {"x": {"q": 2}}}}, {"x": {"x": {"x": {"q": 2}}}}),
        ([[[[1], 1]]], [[[[2], 2]]], [[[[2], 2]]]),
        ([[[{"p": 1}]]], [[[{"q": 2}]]], [[[{"q": 2}]]]),
    ],
)
def test_merged_state_takes_objects_of_types_and_deep_levels_whole(
    static: Any, dynamic: Any, merged: Any
) -> None:
    """Their keys would mix two values that the script has never had together."""
    assert slot_memory.merge_state({"a": static, "b": 1}, {"a": dynamic}) == {"a": merged, "b": 1}


# ---- processors that reorder ---------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "ppc64le", "riscv64"])
def test_weakly_ordered_machine_has_barrier_around_each_access(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barriers record what is stored when they run."""
    found: list[int] = []
    descriptor = ControlBlock.create()
    monkeypatch.setattr(shared_page, "MACHINE", "x86_64")
    plain = ControlBlock(descriptor)
    monkeypatch.setattr(shared_page, "MACHINE", machine)
    monkeypatch.setattr(shared_page, "barrier", lambda: found.append(plain.slot_record(0).get("snapshot_id")))
    control = ControlBlock(descriptor)
    os.close(descriptor)
    record = control.slot_record(0)
    for value in (7, 8):
        record.set("snapshot_id", value)
        assert record.get("snapshot_id") == value
    # Around each of: store 7, read it, store 8, read it.
    assert found == ([] if machine == "x86_64" else [0, 7, 7, 7, 7, 8, 8, 8])
    found.clear()
    control.set("decided_id", 8)
    control.set_copying(0, 8)
    record.set_copied(0, 8)
    record.set("share_count", 1)
    assert record.complete_snapshot_id() == 8  # reads id, two serials, count, and the ranks' ids at once
    assert not control.is_copying([0], 7)
    assert len(found) == (1 if machine == "x86_64" else 2 * 10 + 1)  # one of its own after `copying`
    control.close()
    plain.close()
