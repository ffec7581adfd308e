"""Test what the pool of a node's slots logs, allocates, pins and frees at its limits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_resume.slots import slot_memory, slot_pool
from elastic_resume.slots.slot_memory import SlotState, encode_snapshot_id
from elastic_resume.slots.slot_pool import SlotPool
from tests.support.processes import wait_for

BYTES = 4096
AMPLE = 1 << 30


@pytest.fixture
def make_pool(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., SlotPool]]:
    """Yield a function that creates pools; close them at the end."""
    caplog.set_level("DEBUG")
    with contextlib.ExitStack() as stack:

        def make(allowed_bytes: int | None, free_bytes: int = AMPLE) -> SlotPool:
            pool = SlotPool(
                allowed_bytes, measure_free_bytes=lambda: free_bytes - BYTES * sum(capacities(pool))
            )
            stack.callback(pool.close)
            return pool

        yield make


def complete(pool: SlotPool, index: int, step: int) -> SlotState:
    """Complete a snapshot in a slot; return the state of the slot."""
    slot = pool._owned[index].slot
    snapshot_id = encode_snapshot_id(1, step)
    assert slot.take(snapshot_id)
    slot.record.set_copied(0, snapshot_id)
    slot.announce(snapshot_id)
    return slot.record.read_state()


def capacities(pool: SlotPool) -> list[int]:
    """Return the pages of each slot."""
    return sorted(state.capacity // BYTES for state in pool.control_block.read_slots())


def allocated_pages(pool: SlotPool) -> list[int]:
    """Return how many pages of each slot have memory."""
    return [os.fstat(owned.descriptor).st_blocks * 512 // BYTES for owned in pool._owned.values()]


@pytest.mark.parametrize(
    ("pages", "level", "text"),
    [
        ((None, 12), "DEBUG", "3 slots of 8.19 kB (24.6 kB allowed, half of the 49.2 kB free)"),
        (
            (None, 2),
            "WARNING",
            "none, a slot of 8.19 kB does not fit (4.1 kB allowed, half of the 8.19 kB free)",
        ),
        ((6, 0), "DEBUG", "3 slots of 8.19 kB (24.6 kB allowed, snapshot-memory)"),
        ((4, 0), "DEBUG", "2 slots of 8.19 kB (16.4 kB allowed, snapshot-memory)"),
        ((2, 0), "WARNING", "1 slot of 8.19 kB (8.19 kB allowed, snapshot-memory)"),
        ((0, 12), "DEBUG", "none, a slot of 8.19 kB does not fit (0 B allowed, snapshot-memory)"),
    ],
)
def test_reserve_logs_budget_and_warns_of_less_than_two_slots(
    pages: tuple[int | None, int],
    level: str,
    text: str,
    make_pool: Callable[..., SlotPool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``pages``: allowed and free. Users who have turned snapshots off are not warned."""
    allowed_pages, free_pages = pages
    pool = make_pool(allowed_pages if allowed_pages is None else allowed_pages * BYTES, free_pages * BYTES)
    pool.reserve_in_background(2 * BYTES, log=False)
    for thread in threading.enumerate():
        if thread.name == "elastic-resume-reserve":
            thread.join()
    assert caplog.messages == []
    for _ in range(2):
        pool.reserve(2 * BYTES)
    (record,) = caplog.records
    assert (record.levelname, record.message.split(";")[0]) == (level, f"snapshots: {text}")


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("all_now", [False, True])
@pytest.mark.skipif(not slot_memory.can_populate_pages(), reason="this kernel allocates each slot at once")
def test_reserve_leaves_only_large_slots_for_transfers_without_memory(
    is_large: bool, all_now: bool, make_pool: Callable[..., SlotPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody populates the others before their first store, which would raise SIGBUS without memory."""
    monkeypatch.setattr(slot_memory, "SMALL_SLOT_BYTES", BYTES if is_large else AMPLE)
    monkeypatch.setattr(slot_pool, "_allocate_slot", lambda descriptor, _: os.close(descriptor))
    pool = make_pool(3 * 2 * BYTES)
    assert pool.reserve(2 * BYTES, all_now=all_now) == 3
    count = 1 if is_large and not all_now else 3
    wait_for(lambda: len(pool._owned) == count, "the slots")
    assert allocated_pages(pool) == [0 if is_large and not all_now else 2] * count


def test_allocation_in_background_closes_its_descriptor(
    make_pool: Callable[..., SlotPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep the memory of a slot that has been dropped."""
    monkeypatch.setattr(slot_memory, "SMALL_SLOT_BYTES", BYTES)
    pool = make_pool(2 * BYTES)
    pool.reserve(2 * BYTES, all_now=False)
    inode = os.fstat(pool._owned[0].descriptor).st_ino
    wait_for(lambda: allocated_pages(pool) == [2], "the slot's memory")

    def references() -> int:
        count = 0
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - other threads open and close
            with contextlib.suppress(OSError):
                count += Path("/proc/self/fd", name).stat().st_ino == inode
        return count

    wait_for(lambda: references() == 2, "the descriptor to be closed")  # the pool's, and its mapping's


def test_pinned_slots_stay_until_records_run_out(make_pool: Callable[..., SlotPool]) -> None:
    """No slot that is being read is dropped, whichever its pin; the newest snapshot needs none."""
    pool = make_pool(AMPLE)
    with contextlib.ExitStack() as pins:
        for pages, count in ((1, 3), (2, 3), (3, 2), (4, 0)):
            assert pool.reserve(pages * BYTES) == count
            for index, owned in pool._owned.items():
                if owned.slot.capacity == pages * BYTES:
                    state = complete(pool, index, step=index)
                    assert pins.enter_context(pool.pin(state, hard=index % 2 == 0)) is owned.slot
        assert capacities(pool) == [1, 1, 1, 2, 2, 2, 3, 3]
    pool.reserve(5 * BYTES)
    assert capacities(pool) == [3, 5, 5, 5]
    newest = complete(pool, 0, step=9)
    with pool.pin(newest) as slot:
        assert slot is pool._owned[newest.index].slot
    with pool.pin(replace(newest, snapshot_id=newest.snapshot_id + 2)) as slot:
        assert slot is None, "the slot holds another snapshot"
    for missing in (replace(newest, serial=newest.serial - 1), replace(newest, index=slot_memory.MAX_SLOTS)):
        with pool.pin(missing) as slot:
            assert slot is None, "the slot has been dropped"


def test_request_that_does_not_fit_keeps_slots_and_newest_snapshot(
    make_pool: Callable[..., SlotPool],
) -> None:
    """Where a larger slot fits, but not beside the newest snapshot, none is planned."""
    pool = make_pool(6 * BYTES)
    pool.reserve(2 * BYTES)
    serials = [state.serial for state in pool.control_block.read_slots()]
    assert pool.reserve(7 * BYTES) == 0
    assert [state.serial for state in pool.control_block.read_slots()] == serials
    complete(pool, 0, step=1)
    assert pool.reserve(5 * BYTES) == 0
    assert capacities(pool) == [2]
    assert pool.reserve(4 * BYTES) == 1
    assert capacities(pool) == [2, 4]


def test_free_memory_without_limit_includes_present_slots(make_pool: Callable[..., SlotPool]) -> None:
    """Half of what is free, and of what the slots hold, which larger slots would replace."""
    pool = make_pool(None, 18 * BYTES)
    assert pool.reserve(2 * BYTES) == 3
    assert pool.reserve(3 * BYTES) == 3
    assert capacities(pool) == [3, 3, 3]


LIMITED = """
import logging, os, resource, sys
from elastic_resume.slots.slot_pool import SlotPool

logging.basicConfig(format="%(message)s", level="DEBUG", stream=sys.stdout)
pool = SlotPool(1 << 40, measure_free_bytes=lambda: 1 << 40)
descriptors = len(os.listdir("/proc/self/fd"))
resource.setrlimit(getattr(resource, sys.argv[1]), (1 << 30, 1 << 30))
for size in (2 << 30, 2 << 30, 3 << 30):
    assert pool.reserve(size, all_now=False) == 0
assert pool.control_block.read_slots() == []
assert len(os.listdir("/proc/self/fd")) == descriptors
assert pool.reserve(4096) == 3
"""


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_AS"])
@pytest.mark.skipif(not slot_memory.can_populate_pages(), reason="it would take gigabytes of memory")
def test_slot_that_cannot_be_created_or_mapped_is_logged_once_and_freed(limit: str) -> None:
    """Workers repeat the request, and a descriptor kept from each would hold a whole slot's memory."""
    lines = subprocess.check_output([sys.executable, "-c", LIMITED, limit], text=True).splitlines()
    words = [line.split("(")[0].split(": ")[1].strip() for line in lines]
    failure = "no memory for another slot of"
    sizes = ["2.15 GB", "3.22 GB"]
    expected = [text for size in sizes for text in (f"3 slots of {size}", f"{failure} {size}")]
    assert words == [*expected, "3 slots of 4.1 kB"]
