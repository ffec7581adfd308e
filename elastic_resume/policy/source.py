"""Which copy a generation resumes from, and who sends it to whom. Pure.

Every rank calls `choose` with the same gathered inventories and gets the same plan: nothing needs to be
agreed on afterwards. Copies are ordered by (generation, step), greatest first; never by time or path, and
never by step alone, or a stale higher step of an abandoned lineage would win.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_resume.errors import NoValidCheckpointError


@dataclass(frozen=True)
class Copy:
    """A checkpoint that a node can read. ``home`` is the node in whose directory it lies."""

    home: str
    generation: int
    step: int
    writer_rank: int

    @property
    def order(self) -> tuple[int, int]:
        """What "newest" means."""
        return (self.generation, self.step)


@dataclass(frozen=True)
class Rejected:
    """A copy that exists and may not be loaded, with the reason for people."""

    node: str
    name: str
    reason: str


@dataclass(frozen=True)
class Inventory:
    """What one node could resume from.

    ``floor`` is the greatest generation the node knew when its supervisor started, and ``began`` tells
    whether that supervisor has been in a world since: both serve ``--resume never`` and ``--resume PATH``,
    which set aside what is older than this start of the job, and only that.
    """

    node: str
    lead_rank: int
    copies: tuple[Copy, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    generation: int = 0
    floor: int = 0
    began: bool = False
    given: Copy | None = None  # what --resume PATH points at, where this node can read it
    last_step: int = 0  # newest step that the node's workers finished, in last_generation
    last_generation: int = 0
    last_world_size: int | None = None


@dataclass(frozen=True)
class ResumePlan:
    """What this generation starts from.

    ``kind`` is "checkpoint" or "cold". Of a cold start the source is rank 0 and its live state.
    ``holders`` and ``lacking`` are node names; ``home`` tells in whose directory each holder reads.
    """

    kind: str
    generation: int
    step: int = 0
    source_node: str = ""
    source_rank: int = 0
    source_generation: int = 0
    holders: tuple[tuple[str, Copy], ...] = ()
    lacking: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    lost_steps: int = 0
    previous_world_size: int | None = None

    def copy_of(self, node: str) -> Copy | None:
        """The copy that ``node`` reads, or None when it lacks one."""
        return dict(self.holders).get(node)


def choose(
    inventories: Sequence[Inventory], mode: str, failed: Iterable[tuple[str, Copy]] = ()
) -> ResumePlan:
    """Pick the newest copy that some node holds.

    Args:
        inventories: one for each node, in any order.
        mode: auto, must, never, or a path (see `Inventory.given`).
        failed: (node, copy) pairs that were tried in this resume and could not be read.

    Raises:
        NoValidCheckpointError: copies exist and none may be loaded; or none exists and mode is ``must``
            or a path.

    """
    nodes = sorted(inventories, key=lambda inventory: inventory.lead_rank)
    generation = 1 + max([i.generation for i in nodes] + [c.generation for i in nodes for c in i.copies])
    rejected = tuple(reason for i in nodes for reason in i.rejected)
    bad = set(failed)
    fresh = mode not in {"auto", "must"}
    floor = _floor(nodes) if fresh else -1
    readable = {
        i.node: [c for c in i.copies if c.generation > floor and (i.node, c) not in bad] for i in nodes
    }
    if mode not in {"auto", "must", "never"} and not any(readable.values()):
        readable = {i.node: [i.given] for i in nodes if i.given and (i.node, i.given) not in bad}
    orders = [copy.order for copies in readable.values() for copy in copies]
    lived = max(nodes, key=lambda i: (i.last_generation, i.last_step))
    if not orders:
        if not _may_start_cold(nodes, mode, floor, rejected):
            raise NoValidCheckpointError(_nothing_valid(mode, rejected))
        return ResumePlan(
            "cold", generation, rejected=rejected, lost_steps=lived.last_step if not fresh else 0
        )
    newest = max(orders)
    holders = [
        (i, min((c for c in readable.get(i.node, ()) if c.order == newest), key=lambda c: _own_first(c, i)))
        for i in nodes
        if any(c.order == newest for c in readable.get(i.node, ()))
    ]
    # Where replicas may differ (BatchNorm's buffers) rank 0's are the job's, as in DDP itself.
    source, _ = min(holders, key=lambda pair: (pair[1].writer_rank, pair[0].lead_rank))
    held = {i.node for i, _ in holders}
    return ResumePlan(
        "checkpoint",
        generation,
        step=newest[1],
        source_node=source.node,
        source_rank=source.lead_rank,
        source_generation=newest[0],
        holders=tuple((i.node, copy) for i, copy in holders),
        lacking=tuple(i.node for i in nodes if i.node not in held),
        rejected=rejected,
        lost_steps=max(0, lived.last_step - newest[1]) if lived.last_generation > floor else 0,
        previous_world_size=lived.last_world_size,
    )


def _own_first(copy: Copy, inventory: Inventory) -> tuple[bool, int]:
    return (copy.home != inventory.node, copy.writer_rank)


def _floor(nodes: Sequence[Inventory]) -> int:
    """The generation that was newest when this start of the job began.

    A node whose supervisor has been in a world of this start knows it. When none has, this is the start,
    and every generation known to anybody is older than it.
    """
    began = [inventory.floor for inventory in nodes if inventory.began]
    return min(began) if began else max(inventory.generation for inventory in nodes)


def _may_start_cold(
    nodes: Sequence[Inventory], mode: str, floor: int, rejected: tuple[Rejected, ...]
) -> bool:
    if mode == "never":
        # A copy of this very start that cannot be read is no reason to forget it either.
        return not any(c.generation > floor for i in nodes for c in i.copies)
    return mode == "auto" and not rejected


def _nothing_valid(mode: str, rejected: tuple[Rejected, ...]) -> str:
    if not rejected:
        what = "there is no checkpoint" if mode == "must" else f"no node can read a checkpoint at {mode}"
        return f"--resume {mode}: {what}; check --ckpt-dir and --rdzv-id, or start fresh with --resume auto."
    shown = "; ".join(f"{r.node}/{r.name}: {r.reason}" for r in rejected[:4])
    more = f"; and {len(rejected) - 4} more" if len(rejected) > 4 else ""
    return (
        f"checkpoints exist and none can be loaded ({shown}{more}). Nothing was deleted. "
        "Repair one, or start over on purpose with --resume never."
    )
