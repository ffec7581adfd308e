"""How many slots of memory a node gives to snapshots. Pure: sizes come in as numbers."""

from __future__ import annotations

SLOTS = 3  # the newest whole one, one being written, one being committed to disk
SHARE = 0.5  # of the memory that is free: the rest is for what training itself still takes


def slots_that_fit(slot_bytes: int, *, free_bytes: int, allowed_bytes: int | None = None) -> int:
    """Give the number of slots, 0 to `SLOTS`.

    Args:
        slot_bytes: of one slot.
        free_bytes: that the node could still take, slots that would make room for these included.
        allowed_bytes: what the user grants all slots together; None: `SHARE` of what is free.

    """
    allowed = int(free_bytes * SHARE) if allowed_bytes is None else allowed_bytes
    return min(SLOTS, allowed // max(1, slot_bytes))


def describe(slots: int, slot_bytes: int, *, free_bytes: int, allowed_bytes: int | None = None) -> str:
    """Say in one line what the node's snapshots get, and what that means."""
    allowed = int(free_bytes * SHARE) if allowed_bytes is None else allowed_bytes
    source = f"half of the {size(free_bytes)} free" if allowed_bytes is None else "--snapshot-memory"
    of = f"{size(slot_bytes)} of memory each"
    within = f"({size(allowed)} allowed, {source})"
    if slots >= SLOTS:
        return f"snapshots: {slots} slots with {of} {within}"
    if slots == 2:
        return f"snapshots: 2 slots with {of} {within}; none is taken while a second one is being saved"
    if slots == 1:
        return (
            f"snapshots: 1 slot with {of} {within}: memory holds what is being saved, and a failure costs "
            "the steps since the last save"
        )
    return (
        f"snapshots: none, {size(slot_bytes)} of memory do not fit {within}: training waits for the disk at "
        "each save, and a failure costs the steps since"
    )


def size(count: int) -> str:
    """Bytes for people."""
    if count >= 10**9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 10**6 else f"{count / 1e3:.0f} kB"
