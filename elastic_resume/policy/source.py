"""Which copy a generation resumes from, and who sends it to whom. Pure.

Every rank calls `choose` with the same gathered inventories and gets the same plan: nothing needs to be
agreed on afterwards. Copies are ordered by (generation, step), greatest first; never by time or path, and
never by step alone, or a stale higher step of an abandoned lineage would win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    order: tuple[int, int] = (0, 0)  # as far as its name tells


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
    generation: int = 0
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


def choose(inventories: Sequence[Inventory], mode: str) -> ResumePlan:
    """Pick the newest copy that some node holds.

    Args:
        inventories: one for each node, in any order.
        mode: auto, must, never, or a path (see `Inventory.given`).

    Raises:
        NoValidCheckpointError: copies exist and none may be loaded; or none exists and mode is ``must``
            or a path.

    """
    nodes = sorted(inventories, key=lambda inventory: inventory.lead_rank)
    floor = -1 if mode in {"auto", "must"} else _floor(nodes)
    readable = {i.node: [copy for copy in i.copies if copy.generation > floor] for i in nodes}
    if not any(readable.values()):
        _refuse_to_forget(nodes, floor)
        readable = {i.node: [i.given] for i in nodes if i.given}
    plan = _cold(nodes, mode) if not any(readable.values()) else _newest(nodes, readable)
    lived = max(nodes, key=lambda i: (i.last_generation, i.last_step))
    return replace(
        plan,
        generation=1
        + max([i.generation for i in nodes] + [c.generation for i in nodes for c in (*i.copies, *_given(i))]),
        # What is older than the chosen copy would not have been taken anyway.
        rejected=tuple(
            dict.fromkeys(
                r for i in nodes for r in i.rejected if r.order >= (plan.source_generation, plan.step)
            )
        ),
        lost_steps=max(0, lived.last_step - plan.step) if lived.last_generation > floor else 0,
        previous_world_size=lived.last_world_size,
    )


def _given(inventory: Inventory) -> tuple[Copy, ...]:
    return (inventory.given,) if inventory.given else ()


def _newest(nodes: Sequence[Inventory], readable: Mapping[str, Sequence[Copy]]) -> ResumePlan:
    newest = max(copy.order for copies in readable.values() for copy in copies)
    held: dict[str, Copy] = {}
    for node in nodes:
        same = [copy for copy in readable.get(node.node, ()) if copy.order == newest]
        if same:
            held[node.node] = min(same, key=lambda c: (c.home != node.node, c.writer_rank, c.home))
    # Where replicas may differ (BatchNorm's buffers) rank 0's are the job's, as in DDP itself.
    source = min((n for n in nodes if n.node in held), key=lambda n: (held[n.node].writer_rank, n.lead_rank))
    return ResumePlan(
        "checkpoint",
        step=newest[1],
        source_node=source.node,
        source_rank=source.lead_rank,
        source_generation=newest[0],
        holders=tuple(held.items()),
        lacking=tuple(node.node for node in nodes if node.node not in held),
    )


def _cold(nodes: Sequence[Inventory], mode: str) -> ResumePlan:
    if mode == "must":
        raise NoValidCheckpointError(
            "--resume must: no node has a checkpoint of this job. "
            "Check --ckpt-dir and --rdzv-id, or start fresh with --resume auto."
        )
    if mode not in {"auto", "never"}:
        why = _list([rejected for node in nodes for rejected in node.rejected if rejected.order == (0, 0)])
        raise NoValidCheckpointError(
            f"--resume {mode}: no node can read a checkpoint there{f' ({why})' if why else ''}. Give the "
            "directory that holds manifest.json, as `elastic-resume ls` prints it."
        )
    return ResumePlan("cold", source_node=nodes[0].node, source_rank=nodes[0].lead_rank)


def _floor(nodes: Sequence[Inventory]) -> int:
    """The generation that was newest when this start of the job began.

    A node whose supervisor has been in a world of this start knows it. When none has, this is the start,
    and every generation known to anybody is older than it.
    """
    began = [inventory.floor for inventory in nodes if inventory.began]
    return min(began) if began else max(inventory.generation for inventory in nodes)


def _refuse_to_forget(nodes: Sequence[Inventory], floor: int) -> None:
    """Raise when copies newer than ``floor`` exist that cannot be read: a fresh start would forget them."""
    found = [rejected for node in nodes for rejected in node.rejected if rejected.order[0] > floor]
    if found:
        raise NoValidCheckpointError(
            f"checkpoints exist and none can be loaded ({_list(found)}). Nothing was deleted. "
            "Repair one, or start over on purpose with --resume never."
        )


def _list(rejected: Sequence[Rejected]) -> str:
    shown = "; ".join(f"{r.node}/{r.name}: {r.reason}" for r in rejected[:4])
    return f"{shown}; and {len(rejected) - 4} more" if len(rejected) > 4 else shown


def without(inventory: Inventory, copy: Copy, name: str, reason: str) -> Inventory:
    """The inventory of a node that has just failed to read ``copy``."""
    given = inventory.given == copy
    return replace(
        inventory,
        copies=tuple(kept for kept in inventory.copies if kept != copy),
        given=None if given else inventory.given,
        rejected=(
            *inventory.rejected,
            Rejected(copy.home or inventory.node, name, reason, (0, 0) if given else copy.order),
        ),
    )
