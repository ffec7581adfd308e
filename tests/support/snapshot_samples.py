"""Small snapshots for tests of slots, the committer and the comparison of replicas."""

from __future__ import annotations

import time

from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.slots import slot_memory
from elastic_resume.slots.ipc import LocalSnapshot, SlotClient
from elastic_resume.slots.slot_memory import Slot, encode_snapshot_id

LAYOUT = Layout.build([TensorSpec("model/w", "U8", (100_000,))])
SLOT_BYTES = slot_memory.required_slot_bytes(LAYOUT.total_bytes, 1000, 1000)


def write_snapshot(
    slot: Slot, step: int, *, generation: int = 1, commit_requested: bool = False, share_count: int = 1
) -> int:
    """Write a snapshot into ``slot`` as a local leader does; local rank 0 has copied its share."""
    snapshot_id = encode_snapshot_id(generation, step)
    static = {
        "run_id": "job", "node": "a", "rank": 0, "world_size": 1, "writer": "test",
        "rank0_tensors": [], "state": {"model": {"w": {"$": "tensor", "name": "model/w", "kind": "tensor"}}},
    }  # fmt: skip
    position = Position(0, step, step, step)
    dynamic = slot_memory.dynamic_metadata(generation, position, time.time(), {})
    assert slot.take(snapshot_id)
    slot.write_metadata(
        LAYOUT.header,
        LAYOUT.total_bytes,
        slot_memory.encode_metadata(static),
        slot_memory.encode_metadata(dynamic),
        7,
    )
    slot.memory[len(LAYOUT.header) : LAYOUT.total_bytes] = bytes([step % 256]) * 100_000
    slot.announce(snapshot_id, share_count=share_count, commit_requested=commit_requested)
    slot.record.set_copied(0, snapshot_id)
    return snapshot_id


def read_newest(client: SlotClient) -> LocalSnapshot | None:
    """Return the newest complete snapshot of a node."""
    state = slot_memory.newest_complete(client.control_block.read_slots())
    return None if state is None else client.read_snapshot(state)
