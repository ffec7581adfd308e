"""Choose the saved state that a generation resumes from, and plan which nodes send it to which.

Every rank calls `choose_resume_plan` with the same inventories of all nodes and gets the same plan, so the
ranks need no further agreement. Saved states are ordered by (generation, step), greatest first. Time and path
do not count. The step alone does not count either, because an abandoned history may have reached a higher
step.

A saved state that cannot be loaded is skipped with a message, and an older one is used. One of a newer format
is never skipped: it is valid, and an upgrade can still load it.

A saved state is a snapshot in memory, or a checkpoint on disk or in the archive. The order ignores the tier.
A node that has the same state in memory and on disk reads the snapshot. A state that a node holds is not read
from the archive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_resume.errors import (
    ArchiveError,
    ArchiveErrorKind,
    ArchiveOutageError,
    CorruptError,
    ForeignError,
    NewerFormatError,
    NoValidCheckpointError,
    UnreadableError,
)
from elastic_resume.milestone import Milestone, Version, WayBack

MEMORY, DISK, ARCHIVE = "memory", "disk", "archive"
ASIDE = "aside"
MAX_CHAIN_NODES = 16
MAX_READERS = 8  # nodes that read an archived state; each takes the shares of all others
MIN_SHARE_BLOCKS = 2


@dataclass(frozen=True)
class SavedState:
    """A checkpoint that a node can read, or a snapshot in its memory.

    ``owner_node`` is the node whose directory or memory holds it, or that has written an archived one.
    ``nbytes`` is its size in bytes. ``epoch`` distinguishes two states of an epoch's last step: one before
    and one after the end-of-epoch code ran. ``step_in_epoch`` is 0 at the beginning of an epoch. The last
    two: see `milestone.Milestone` and `milestone.WayBack`.
    """

    owner_node: str
    generation: int
    step: int
    writer_rank: int
    tier: str = DISK
    nbytes: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    milestones: tuple[Milestone, ...] = ()
    ways_back: tuple[WayBack, ...] = ()

    @property
    def version(self) -> Version:
        """Return the key that orders saved states: (generation, step)."""
        return (self.generation, self.step)

    @property
    def moment(self) -> tuple[int, int, int]:
        """Return (generation, step, epoch): the version, and which of two at an epoch's last step."""
        return (*self.version, self.epoch)


@dataclass(frozen=True)
class RejectedState:
    """A saved state that exists and must not be loaded, with the reason.

    ``kind`` is the kind of the CheckpointError, or `ASIDE` if the checkpoint is in quarantine. ``milestones``
    are names. ``archive_error`` is the kind of the ArchiveError if nothing of the archive can be read: what
    states it has is unknown.
    """

    node: str
    name: str
    reason: str
    version: tuple[int, int] = (0, 0)  # (generation, step) by its name; (0, 0) if unreadable
    kind: str = CorruptError.kind
    milestones: tuple[str, ...] = ()
    archive_error: ArchiveErrorKind | None = None

    @property
    def blocks_older(self) -> bool:
        """Whether resuming from an older state would lose valid steps."""
        return self.kind == NewerFormatError.kind


@dataclass(frozen=True)
class Inventory:
    """The saved states of one node, and what it knows of earlier generations.

    ``committed_generation`` is the newest generation that had a checkpoint on this node, even if it has been
    deleted. ``own_generation`` is the newest of this job that has ended; ``generation`` counts all that the
    node has seen. ``archive`` is the address that it was given, empty without one. ``resume_from`` is its
    request to go back; see `going_back`. ``has_restarted`` (this start has resumed before) and ``command``
    (script and arguments of the last start) concern the start. The next three are for `proof`: whether the
    node wants one, with any number of ranks too, and the version of the newest state that was to be computed
    again. ``notes`` are those of mechanisms, as JSON.
    """

    node: str
    local_leader_rank: int
    saved_states: tuple[SavedState, ...] = ()
    rejected: tuple[RejectedState, ...] = ()
    generation: int = 0
    committed_generation: int = 0
    own_generation: int = 0
    archive: str = ""
    resume_from: str = ""
    last_step: int = 0  # newest step that the node's workers finished, in last_generation
    last_generation: int = 0
    last_world_size: int | None = None
    has_restarted: bool = False
    command: tuple[str, ...] = ()
    wants_proof: bool = False
    proves_any_size: bool = False
    replayed_version: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResumePlan:
    """The state that a generation starts from.

    ``kind`` is "resumed" or "cold". The source of a cold start is rank 0 with its live state. ``holders``
    maps node names to the state that each node reads; ``receiving_nodes`` get it sent. ``target`` is the
    newest state, if the generation starts from an earlier one and computes it again; see `proof`.
    ``unproved`` says why it does not, though a proof is wanted. Without ``knows_progress`` no node knows how
    far the generation of the state came.

    ``request`` is the user's request to go back; if ``goes_back``, it is done now, and ``given_up_steps`` are
    not lost but left. ``ways_back`` are written into each state from now on.
    """

    kind: str
    generation: int = 0
    step: int = 0
    source_node: str = ""
    source_rank: int = 0
    source_generation: int = 0
    holders: tuple[tuple[str, SavedState], ...] = ()
    receiving_nodes: tuple[str, ...] = ()
    rejected: tuple[RejectedState, ...] = ()
    recomputed_steps: int = 0
    knows_progress: bool = True
    previous_world_size: int | None = None
    target: SavedState | None = None
    unproved: str = ""
    request: str = ""
    goes_back: bool = False
    given_up_steps: int = 0
    ways_back: tuple[WayBack, ...] = ()

    @property
    def version(self) -> tuple[int, int]:
        """Return (generation, step) of the chosen state; (0, 0) for a cold start."""
        return (self.source_generation, self.step)

    def saved_state_for(self, node: str) -> SavedState | None:
        """Return the state that ``node`` reads, or None if it receives the state."""
        return dict(self.holders).get(node)

    @property
    def source_tier(self) -> str:
        """Return "memory", "disk" or "archive", the tier of the source; "" for a cold start."""
        source = self.saved_state_for(self.source_node)
        return source.tier if source else ""

    @property
    def owner_node(self) -> str:
        """Return the node that saved the state. The source may read the directory of another."""
        source = self.saved_state_for(self.source_node)
        return source.owner_node if source else self.source_node

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of the state that every rank loads."""
        source = self.saved_state_for(self.source_node)
        return source.nbytes if source else 0


@dataclass(frozen=True)
class Senders:
    """The nodes from which a node receives the state: ``first`` at once, ``substitutes`` if these fail."""

    first: tuple[str, ...]
    substitutes: tuple[str, ...]


def plan_senders(plan: ResumePlan) -> dict[str, Senders]:
    """Plan from which nodes each receiving node takes the state; each node passes on what it has.

    With H holders, each of the first H receivers takes blocks from all holders, so each holder sends the
    state once. Every later receiver takes it from one earlier receiver. With at most `MAX_CHAIN_NODES`
    receivers for each holder, each has one successor; otherwise two, so that the depth grows logarithmically.
    A receiver's substitutes are holders and earlier receivers, so no two nodes wait for each other. Nodes
    with the state in memory send, if there are any, because a disk is slower than most links.
    """
    if plan.kind == "cold":
        return {}
    fast = [node for node, state in plan.holders if state.tier == MEMORY]
    fast = fast or [node for node, _ in plan.holders]
    slow = [node for node, _ in plan.holders if node not in fast]
    successors = 1 if len(plan.receiving_nodes) <= MAX_CHAIN_NODES * len(fast) else 2
    senders = {}
    for i, node in enumerate(plan.receiving_nodes):
        start = i % len(fast)
        holders = (*fast[start:], *fast[:start])  # the first ones differ, where not all are used at once
        earlier = plan.receiving_nodes[:i]
        is_direct = i < len(fast)
        first = holders if is_direct else (plan.receiving_nodes[(i - len(fast)) // successors],)
        others = (*holders, *slow, *reversed(earlier))
        senders[node] = Senders(first, tuple(other for other in others if other not in first))
    return senders


def plan_readers(plan: ResumePlan, blocks: int) -> tuple[str, ...]:
    """Return the receiving nodes that help the source to read ``blocks`` blocks from the archive."""
    count = min(MAX_READERS, blocks // MIN_SHARE_BLOCKS) - 1
    return plan.receiving_nodes[: max(0, count)]


def choose_resume_plan(inventories: Sequence[Inventory], mode: str) -> ResumePlan:
    """Choose the newest saved state of all nodes.

    Args:
        inventories: one per node, in any order.
        mode: "auto", "must" or "never", as ``--resume``. With "never" the states are all of this start,
            because the node's owner has moved the others aside.

    Raises:
        NoValidCheckpointError: saved states exist and none may be loaded; the newest has a newer format; none
            exists and mode is "must"; or none exists now and a node is known to have had one.
    """
    nodes = sorted(inventories, key=lambda inventory: inventory.local_leader_rank)
    _refuse_to_go_back(nodes)
    if any(node.saved_states for node in nodes):
        plan = _plan_from_newest(nodes)
    else:
        _refuse_to_start_over(nodes)
        if mode == "must":
            raise NoValidCheckpointError(
                "--resume must: no node has a checkpoint of this job. "
                "Check --ckpt-dir and --rdzv-id, or start fresh with --resume auto."
            )
        plan = ResumePlan("cold", source_node=nodes[0].node, source_rank=nodes[0].local_leader_rank)
    lived = max(nodes, key=lambda i: (i.last_generation, i.last_step))
    # A node that was absent since an older generation knows steps of a history that may be abandoned.
    lived_step = lived.last_step if lived.last_generation >= plan.source_generation else 0
    return replace(
        plan,
        generation=1 + _newest_known_generation(nodes),
        # Rejected states that are older than the chosen one would not have been used anyway.
        rejected=tuple(dict.fromkeys(r for i in nodes for r in i.rejected if r.version >= plan.version)),
        recomputed_steps=max(0, lived_step - plan.step),
        knows_progress=lived.last_generation >= plan.source_generation,
        previous_world_size=lived.last_world_size,
    )


def _plan_from_newest(nodes: Sequence[Inventory]) -> ResumePlan:
    newest = max(state.moment for node in nodes for state in node.saved_states)
    held: dict[str, SavedState] = {}
    for node in nodes:
        same = [state for state in node.saved_states if state.moment == newest]
        if same:
            held[node.node] = min(
                same,
                key=lambda state: (  # a node's own directory first, then memory
                    state.tier == ARCHIVE,
                    state.owner_node != node.node,
                    state.tier != MEMORY,
                    state.writer_rank,
                    state.owner_node,
                ),
            )
    of_nodes = {node: state for node, state in held.items() if state.tier != ARCHIVE}
    held = of_nodes or held
    # BatchNorm's buffers may differ between replicas; rank 0's count, as in DDP. Two states of one writer
    # have the same bytes: the faster tier is used.
    source = min(
        (n for n in nodes if n.node in held),
        key=lambda n: (held[n.node].writer_rank, held[n.node].tier != MEMORY, n.local_leader_rank),
    )
    return ResumePlan(
        "resumed",
        step=newest[1],
        source_node=source.node,
        source_rank=source.local_leader_rank,
        source_generation=newest[0],
        holders=tuple(held.items()),
        receiving_nodes=tuple(node.node for node in nodes if node.node not in held),
        ways_back=held[source.node].ways_back,
    )


def _newest_known_generation(nodes: Sequence[Inventory]) -> int:
    """Return the greatest generation that any node knows, also of deleted and unreadable states."""
    states = [state.generation for node in nodes for state in node.saved_states]
    rejected = [r.version[0] for node in nodes for r in node.rejected if r.kind != ForeignError.kind]
    return max([*(max(node.generation, node.committed_generation) for node in nodes), *states, *rejected])


def _refuse_to_go_back(nodes: Sequence[Inventory]) -> None:
    """Raise if a state of a newer format is at least as new as the newest readable one."""
    newest = max((state.version for node in nodes for state in node.saved_states), default=(-1, -1))
    found = [r for node in nodes for r in node.rejected if r.blocks_older and r.version >= newest]
    if found:
        raise NoValidCheckpointError(
            f"a newer elastic_resume wrote the newest checkpoint ({_list_rejected(found)}). Nothing was "
            "changed. Upgrade elastic_resume on every node. To go back on purpose, move that checkpoint "
            "elsewhere or use --resume never."
        )


def _refuse_to_start_over(nodes: Sequence[Inventory]) -> None:
    """Raise if states exist or existed: a fresh start would lose them."""
    found = [rejected for node in nodes for rejected in node.rejected]
    if found:
        error = NoValidCheckpointError(
            f"checkpoints exist and none can be loaded ({_list_rejected(found)}). Nothing was deleted. "
            "Repair one, or start over on purpose with --resume never."
        )
        # A read that failed now may succeed at the next attempt.
        error.is_deterministic = not any(rejected.kind == UnreadableError.kind for rejected in found)
        raise error
    had = [node.node for node in nodes if node.committed_generation]
    if had:
        raise NoValidCheckpointError(
            f"{', '.join(had[:4])}: had checkpoints of this job, and no node has one now. Were they removed, "
            "or is a disk not mounted? Start over on purpose with --resume never."
        )


def _list_rejected(rejected: Sequence[RejectedState]) -> str:
    shown = "; ".join(f"{r.node}/{r.name}: {r.reason}" for r in rejected[:4])
    return f"{shown}; and {len(rejected) - 4} more" if len(rejected) > 4 else shown


def find_unlike_archives(inventories: Sequence[Inventory]) -> str:
    """Return a sentence about nodes with different archives; empty if all have the same or none.

    Rank 0's node alone lists the archive, so a start could pass over what the archive of another node has.
    """
    archives = {each.node: each.archive or "off" for each in inventories}
    if len(set(archives.values())) < 2:
        return ""
    shown = "; ".join(f"{node}: {archive}" for node, archive in sorted(archives.items())[:8])
    return f"--archive differs between nodes ({shown}). Give all nodes the same address."


def split_archive_error(
    inventories: Sequence[Inventory],
) -> tuple[RejectedState | None, list[Inventory]]:
    """Return why the archive cannot be read, None if it can, and the inventories without that."""
    errors = [rejected for each in inventories for rejected in each.rejected if rejected.archive_error]
    rest = [
        replace(each, rejected=tuple(r for r in each.rejected if not r.archive_error)) for each in inventories
    ]
    return (errors[-1] if errors else None), rest


def judge_archive_error(error: RejectedState, waited_s: float, patience_s: float) -> ArchiveError | None:
    """Return the error that ends a start whose archive cannot be read; None: wait for it.

    A start without it could go back, or lose what is archived. Its generations count with ``--resume never``.
    """
    sentence, kind = f"{error.reason.rstrip('.')}.", error.archive_error or ArchiveErrorKind.UNAVAILABLE
    if not kind.can_pass:
        end = ArchiveError(
            f"{sentence} The archive may hold a newer state than the nodes, so nothing was started or "
            "changed. Mend that, or ignore what is archived with --archive off.",
            kind=kind,
        )
        end.is_deterministic = True
        return end
    if waited_s < patience_s:
        return None
    return ArchiveOutageError(
        f"the archive could not be read for {waited_s / 60:.0f} min: {sentence} It may hold a newer state "
        "than the nodes, so nothing was changed; run the same command again when the archive is back.",
        kind=kind,
    )


def drop_foreign_states(inventories: Sequence[Inventory]) -> tuple[list[Inventory], SavedState | None]:
    """Return the inventories without archived states of another job, and the newest of those states.

    A job that has trained in this start knows its generations. A newer one in the archive is of another job
    with its run id, whose start has counted on from what this one had archived.
    """
    own = max(each.own_generation for each in inventories)
    foreign = [
        state
        for each in inventories
        for state in each.saved_states
        if state.tier == ARCHIVE and state.generation > own
    ]
    has_trained = any(each.has_restarted for each in inventories)
    has_own = any(state.tier != ARCHIVE for each in inventories for state in each.saved_states)
    if not foreign or not (own and has_trained and has_own):
        return list(inventories), None
    kept = [
        replace(each, saved_states=tuple(state for state in each.saved_states if state not in foreign))
        for each in inventories
    ]
    return kept, max(foreign, key=lambda state: state.moment)


def add_states(inventory: Inventory, more: Inventory) -> Inventory:
    """Return the inventory of a node with ``more``, which it has listed later."""
    return replace(
        inventory,
        saved_states=(*inventory.saved_states, *more.saved_states),
        rejected=(*inventory.rejected, *more.rejected),
        generation=max(inventory.generation, more.generation),
    )


def reject_saved_state(
    inventory: Inventory, saved_state: SavedState, name: str, reason: str, kind: str = CorruptError.kind
) -> Inventory:
    """Return the inventory of a node that has just failed to read ``saved_state``."""
    return replace(
        inventory,
        saved_states=tuple(kept for kept in inventory.saved_states if kept != saved_state),
        rejected=(
            *inventory.rejected,
            RejectedState(
                saved_state.owner_node,
                name,
                reason,
                saved_state.version,
                kind,
                tuple(label.name for label in saved_state.milestones),
            ),
        ),
    )
