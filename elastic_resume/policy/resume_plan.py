"""Which copy a generation resumes from, and who sends it to whom. Pure.

Every rank calls `choose` with the same gathered inventories and gets the same plan: nothing needs to be
agreed on afterwards. Copies are ordered by (generation, step), greatest first; never by time or path, and
never by step alone, or a stale higher step of an abandoned lineage would win.

A copy that cannot be loaded is passed over, aloud, for an older one. Not so the copy of a newer format: it is
valid, and going back behind it would throw steps away that an upgrade brings back.

A copy lies in one of two tiers, a node's memory or a disk. The order of copies does not ask which; only a
node that has the same copy in both takes the one in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_resume.errors import NoValidCheckpointError

MEMORY, DISK = "memory", "disk"


@dataclass(frozen=True)
class SavedState:
    """A checkpoint that a node can read, or a snapshot in its memory.

    ``home`` is the node in whose directory or memory it lies, ``nbytes`` the size of its image. ``epoch``
    tells two copies of one step apart: made with an epoch's last step, and when all else of it was done.
    """

    owner_node: str
    generation: int
    step: int
    writer_rank: int
    tier: str = DISK
    nbytes: int = 0
    epoch: int = 0

    @property
    def version(self) -> tuple[int, int]:
        """What "newest" means."""
        return (self.generation, self.step)


@dataclass(frozen=True)
class RejectedState:
    """A copy that exists and may not be loaded, with the reason for people.

    ``kind`` is that of the CheckpointError, or "aside" for what lies in quarantine.
    """

    node: str
    name: str
    reason: str
    version: tuple[int, int] = (0, 0)  # as far as its name tells
    kind: str = "corrupt"

    @property
    def blocks_older(self) -> bool:
        """Whether to go on from anything older would lose steps that are there."""
        return self.kind == "newer"


@dataclass(frozen=True)
class Inventory:
    """What one node could resume from.

    ``floor`` is the greatest generation the node knew when its supervisor started, and ``began`` tells
    whether that supervisor has been in a world since: both serve ``--resume never``, which sets aside what
    is older than this start of the job, and only that. ``committed`` is the newest generation of which the
    node knows that it had a checkpoint, whether that is still there or not.
    ``restarted`` tells whether this start of the job has been in a world on this node, and ``words`` are the
    script and the arguments of the last start here: people are told of them, nothing is decided by them.
    """

    node: str
    local_leader_rank: int
    saved_states: tuple[SavedState, ...] = ()
    rejected: tuple[RejectedState, ...] = ()
    generation: int = 0
    min_generation: int = 0
    has_joined_world: bool = False
    committed_generation: int = 0
    last_step: int = 0  # newest step that the node's workers finished, in last_generation
    last_generation: int = 0
    last_world_size: int | None = None
    has_restarted: bool = False
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResumePlan:
    """What this generation starts from.

    ``kind`` is "checkpoint" or "cold". Of a cold start the source is rank 0 and its live state.
    ``holders`` and ``lacking`` are node names; ``home`` tells in whose directory each holder reads. What is
    of generation ``floor`` or older has been set aside by ``--resume never`` (-1: nothing was).
    """

    kind: str
    generation: int = 0
    step: int = 0
    source_node: str = ""
    source_rank: int = 0
    source_generation: int = 0
    holders: tuple[tuple[str, SavedState], ...] = ()
    lacking: tuple[str, ...] = ()
    rejected: tuple[RejectedState, ...] = ()
    recomputed_steps: int = 0
    previous_world_size: int | None = None
    min_generation: int = -1

    @property
    def version(self) -> tuple[int, int]:
        """What it starts from: (generation, step) of the copy, (0, 0) of a cold start."""
        return (self.source_generation, self.step)

    def saved_state_for(self, node: str) -> SavedState | None:
        """The copy that ``node`` reads, or None when it lacks one."""
        return dict(self.holders).get(node)

    @property
    def source_tier(self) -> str:
        """Whether the source holds the copy in "memory" or on "disk"; "" of a cold start."""
        copy = self.saved_state_for(self.source_node)
        return copy.tier if copy else ""

    @property
    def nbytes(self) -> int:
        """The size of the image that everybody loads."""
        copy = self.saved_state_for(self.source_node)
        return copy.nbytes if copy else 0


@dataclass(frozen=True)
class Broadcast:
    """One broadcast of the image: from a node that holds it to nodes that do not."""

    source: str
    receivers: tuple[str, ...]


def plan_broadcasts(plan: ResumePlan) -> tuple[Broadcast, ...]:
    """Who sends the image to whom; streams share no node, and all run at the same time.

    A broadcast to m receivers goes along a binomial tree (gloo's, as MPI's): the source's link carries the
    image once for every child that it has, as many as m has binary digits: 1 for one receiver, 2 for two or
    three, 3 for four to seven. So long does a transfer take, in units of the image over one link. Spread over
    s sources it is the digits of m/s: two holders serve two lacking nodes in half the time that one takes.
    Of numbers of streams that are equally fast the smallest is taken, since sending costs the source's node
    some time too. Memory sends before a disk does, which is slower than most links.
    """
    if not plan.lacking or plan.kind == "cold":
        return ()
    holders = sorted(plan.holders, key=lambda held: (held[1].tier != MEMORY, held[0] != plan.source_node))
    most = min(len(holders), len(plan.lacking))
    longest = [math.ceil(len(plan.lacking) / count) for count in range(1, most + 1)]
    count = 1 + min(range(most), key=lambda i: longest[i].bit_length())
    return tuple(Broadcast(holders[i][0], plan.lacking[i::count]) for i in range(count))


def find_minority_holders(plan: ResumePlan, digests_by_node: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Give the holders whose copy is unlike that of a strict majority; none where there is no such majority.

    Args:
        plan: that was carried out.
        told: for each node the digests of what its ranks have loaded. What was sent is no vote,
            and a copy that two nodes have read is one.

    """
    votes: dict[str, set[str]] = {}
    for node, copy in plan.holders:
        votes.setdefault(copy.owner_node, set()).update(digests_by_node[node])
    if any(len(digests) != 1 for digests in votes.values()):
        return ()  # ranks that loaded the same bytes differ: that is no copy's fault
    voted = [next(iter(digests)) for digests in votes.values()]
    right = max(voted, key=voted.count, default="")
    if 2 * voted.count(right) <= len(voted):
        return ()
    return tuple(node for node, copy in plan.holders if right not in votes[copy.owner_node])


def choose_resume_plan(inventories: Sequence[Inventory], mode: str) -> ResumePlan:
    """Pick the newest copy that some node holds.

    Args:
        inventories: one for each node, in any order.
        mode: auto, must or never.

    Raises:
        NoValidCheckpointError: copies exist and none may be loaded; or the newest is of a newer format; or
            none exists and mode is ``must``, or a node is known to have had one.

    """
    nodes = sorted(inventories, key=lambda inventory: inventory.local_leader_rank)
    floor = _min_generation(nodes) if mode == "never" else -1
    readable = {i.node: [copy for copy in i.saved_states if copy.generation > floor] for i in nodes}
    _refuse_to_go_back(nodes, floor, [copy.version for copies in readable.values() for copy in copies])
    if any(readable.values()):
        plan = _plan_from_newest(nodes, readable)
    else:
        _refuse_to_start_over(nodes, floor)
        plan = _plan_cold_start(nodes, mode)
    lived = max(nodes, key=lambda i: (i.last_generation, i.last_step))
    return replace(
        plan,
        generation=1 + max(_newest_known_generation(nodes), floor),
        # What is older than the chosen copy would not have been taken anyway.
        rejected=tuple(dict.fromkeys(r for i in nodes for r in i.rejected if r.version >= plan.version)),
        recomputed_steps=max(0, lived.last_step - plan.step) if lived.last_generation > floor else 0,
        previous_world_size=lived.last_world_size,
        min_generation=floor,
    )


def _plan_from_newest(nodes: Sequence[Inventory], readable: Mapping[str, Sequence[SavedState]]) -> ResumePlan:
    newest = max((copy.version, copy.epoch) for copies in readable.values() for copy in copies)
    held: dict[str, SavedState] = {}
    for node in nodes:
        same = [copy for copy in readable.get(node.node, ()) if (copy.version, copy.epoch) == newest]
        if same:
            held[node.node] = min(same, key=lambda c: _preference_key(c, node.node))
    # Where replicas may differ (BatchNorm's buffers) rank 0's are the job's, as in DDP itself. Two copies of
    # one writer are the same bytes: then the faster tier's.
    source = min(
        (n for n in nodes if n.node in held),
        key=lambda n: (held[n.node].writer_rank, held[n.node].tier != MEMORY, n.local_leader_rank),
    )
    return ResumePlan(
        "checkpoint",
        step=newest[0][1],
        source_node=source.node,
        source_rank=source.local_leader_rank,
        source_generation=newest[0][0],
        holders=tuple(held.items()),
        lacking=tuple(node.node for node in nodes if node.node not in held),
    )


def _preference_key(saved_state: SavedState, node: str) -> tuple[bool, bool, int, str]:
    """Which of several equal copies ``node`` reads: its own before another's, memory before disk."""
    return (
        saved_state.owner_node != node,
        saved_state.tier != MEMORY,
        saved_state.writer_rank,
        saved_state.owner_node,
    )


def _plan_cold_start(nodes: Sequence[Inventory], mode: str) -> ResumePlan:
    if mode == "must":
        raise NoValidCheckpointError(
            "--resume must: no node has a checkpoint of this job. "
            "Check --ckpt-dir and --rdzv-id, or start fresh with --resume auto."
        )
    return ResumePlan("cold", source_node=nodes[0].node, source_rank=nodes[0].local_leader_rank)


def _min_generation(nodes: Sequence[Inventory]) -> int:
    """The generation that was newest when this start of the job began.

    A node whose supervisor has been in a world of this start knows it. When none has, this is the start,
    and every generation known to anybody is older than it.
    """
    began = [inventory.min_generation for inventory in nodes if inventory.has_joined_world]
    return min(began) if began else _newest_known_generation(nodes)


def _newest_known_generation(nodes: Sequence[Inventory]) -> int:
    """Give the greatest generation that anybody knows of, also from copies that are gone or unreadable."""
    copies = [copy.generation for node in nodes for copy in node.saved_states]
    rejected = [r.version[0] for node in nodes for r in node.rejected if r.kind != "foreign"]
    return max([*(max(node.generation, node.committed_generation) for node in nodes), *copies, *rejected])


def _refuse_to_go_back(
    nodes: Sequence[Inventory], min_generation: int, readable: Sequence[tuple[int, int]]
) -> None:
    """Raise when a copy that is not older than the newest of ``readable`` may not be passed over."""
    newest = max(readable, default=(-1, -1))
    found = [r for node in nodes for r in node.rejected if r.blocks_older]
    found = [r for r in found if r.version[0] > min_generation and r.version >= newest]
    if found:
        raise NoValidCheckpointError(
            f"the newest checkpoint is of a newer elastic_resume ({_list_rejected(found)}). Nothing was changed. "
            "Upgrade elastic_resume on every node. To go back on purpose move it elsewhere, or use "
            "--resume never."
        )


def _refuse_to_start_over(nodes: Sequence[Inventory], min_generation: int) -> None:
    """Raise when copies newer than ``floor`` exist or have existed: a fresh start would forget them."""
    found = [rejected for node in nodes for rejected in node.rejected if rejected.version[0] > min_generation]
    if min_generation >= 0:  # an earlier lineage was set aside on purpose, and what is another job's with it
        found = [rejected for rejected in found if rejected.kind != "foreign"]
    if found:
        error = NoValidCheckpointError(
            f"checkpoints exist and none can be loaded ({_list_rejected(found)}). Nothing was deleted. "
            "Repair one, or start over on purpose with --resume never."
        )
        # What could not be read just now may be read by the next attempt.
        error.is_deterministic = not any(rejected.kind == "unreadable" for rejected in found)
        raise error
    had = [node.node for node in nodes if node.committed_generation > max(min_generation, 0)]
    if had:
        raise NoValidCheckpointError(
            f"{', '.join(had[:4])}: had checkpoints of this job, and no node has one now. Were they removed, "
            "or is a disk not mounted? Start over on purpose with --resume never."
        )


def _list_rejected(rejected: Sequence[RejectedState]) -> str:
    shown = "; ".join(f"{r.node}/{r.name}: {r.reason}" for r in rejected[:4])
    return f"{shown}; and {len(rejected) - 4} more" if len(rejected) > 4 else shown


def reject_saved_state(
    inventory: Inventory, saved_state: SavedState, name: str, reason: str, kind: str = "corrupt"
) -> Inventory:
    """The inventory of a node that has just failed to read ``copy``."""
    return replace(
        inventory,
        saved_states=tuple(kept for kept in inventory.saved_states if kept != saved_state),
        rejected=(
            *inventory.rejected,
            RejectedState(saved_state.owner_node, name, reason, saved_state.version, kind),
        ),
    )
