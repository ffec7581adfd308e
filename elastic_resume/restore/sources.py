"""List and open a node's saved states: in its memory, on the disks that it sees, and in the archive.

A `StateSource` lists the states of one tier, opens one for a restore attempt, and gives one up that proved
invalid. `take_inventory` collects what all tiers of this node list. `policy.resume_plan` turns all
inventories into one plan. A further tier is one more class, in `list_sources`. Other nodes are not a tier. A
node without the state opens an empty buffer (`open_for_peers`), and `transfer` fills it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from elastic_resume.archive.archive import Archive, open_archive
from elastic_resume.archive.entries import ArchivedCheckpoint, BadEntry, Moment
from elastic_resume.checkpoint import node_dir, reader
from elastic_resume.checkpoint.catalog import (
    MAX_ENTRIES,
    Catalog,
    CatalogEntry,
    read_milestones,
    read_quarantine_reason,
    scan_run,
)
from elastic_resume.checkpoint.layout import header_size
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import allocate_memory
from elastic_resume.errors import (
    ArchiveError,
    CheckpointError,
    ForeignError,
    NewerFormatError,
    TornError,
    UnreadableError,
)
from elastic_resume.mechanisms.registry import make_notes
from elastic_resume.policy import going_back
from elastic_resume.policy.resume_plan import (
    ARCHIVE,
    ASIDE,
    DISK,
    MEMORY,
    Inventory,
    RejectedState,
    SavedState,
)
from elastic_resume.ranks import rank_context
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore.streaming import BackgroundTask, LocalWatermark, StreamingBuffer
from elastic_resume.restore.transfer import BlockReader
from elastic_resume.slots import slot_memory
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.progress_page import ProgressPage
from elastic_resume.slots.slot_memory import Slot

logger = logging.getLogger(__name__)

MAX_UNKNOWN_STEP = 1 << 40
MAX_NAMES_SHOWN = 8
MAX_QUERY_S = 2.0  # of a job that has trained in this start, which recovers in less
# Limit per directory, newest first. Older ones matter after 64 corrupt ones, or if the user asks for one.
MAX_LISTED_STATES = 64


@dataclass(frozen=True)
class OpenedState:
    """A state that is in this node's memory or arrives there.

    ``slot`` is the slot of ``buffer``, if it is one; with ``fills_slot`` it does not count as a snapshot yet.
    ``on_disk``: this node's own disk holds the state, verified once ``tasks`` have ended without an error.
    """

    manifest: Manifest | None  # None on a rank that maps its local leader's slot
    buffer: StreamingBuffer
    slot: Slot | None = None
    fills_slot: bool = False
    on_disk: bool = False
    tasks: tuple[BackgroundTask, ...] = ()
    reader: BlockReader | None = None
    """What the restore attempt reads the blocks with that have not arrived; None if ``tasks`` bring them."""


@dataclass(frozen=True)
class Listing:
    """The states of a source: those to resume from, those to reject, and the newest generation among all."""

    saved_states: tuple[SavedState, ...]
    rejected: tuple[RejectedState, ...]
    newest_generation: int = 0


class StateSource(Protocol):
    """A tier from which this node reads saved states."""

    tier: str

    def list_states(self, held: Sequence[SavedState] = ()) -> Listing:
        """List the states, on a local leader; ``held`` are those of the tiers before this one."""

    def list_more(self, request: str) -> Listing:
        """List what `list_states` has left out: all that counts, and what ``request`` may mean.

        It is called on a local leader after a state has failed, or with a request to go back.
        """

    def open(self, saved_state: SavedState) -> OpenedState:
        """Start to bring a state into this node's memory. Raises CheckpointError, OSError or MemoryError."""

    def find_reader(self, key: str) -> BlockReader | None:
        """Return a reader of the state that another node has opened; None if only that node can read it.

        ``key`` is the `BlockReader.key` of that node. Raises CheckpointError.
        """

    def name_of(self, saved_state: SavedState) -> str:
        """Return the name of a state for messages."""

    def give_up(self, saved_state: SavedState, reason: str) -> None:
        """Never offer a state again that proved invalid; on a local leader."""


def list_sources(context: RankContext, slot_client: SlotClient | None) -> dict[str, StateSource]:
    """Return the sources of this node by tier. Without ``slot_client`` the node has no memory for states."""
    sources: list[StateSource] = [
        MemorySource(context, slot_client),
        DiskSource(context, slot_client),
        ArchiveSource(context, slot_client),
    ]
    return {source.tier: source for source in sources}


class MemorySource:
    """The snapshots in this node's memory. Their bytes have no digest to check."""

    tier = MEMORY

    def __init__(self, context: RankContext, slot_client: SlotClient | None) -> None:
        self._context = context
        self._slot_client = slot_client

    def list_states(self, held: Sequence[SavedState] = ()) -> Listing:
        """List the complete snapshots; discard those that are damaged."""
        del held
        context, client = self._context, self._slot_client
        if client is None:
            return Listing((), ())
        found: list[SavedState] = []
        rejected: list[RejectedState] = []
        for state in slot_memory.list_complete(client.control_block.read_slots()):
            try:
                snapshot = client.read_snapshot(state)
                if snapshot is not None and snapshot.manifest.run_id != context.settings.run_id:
                    raise ForeignError(f"belongs to the run {snapshot.manifest.run_id!r}.")
            except CheckpointError as error:
                version = slot_memory.decode_snapshot_id(state.snapshot_id)
                name = f"{reader.checkpoint_name(*version)} (in memory)"
                rejected.append(RejectedState(context.node, name, str(error), version, error.kind))
                client.discard(state.index)
                continue
            if snapshot is not None:
                found.append(to_saved_state(context.node, snapshot.manifest, MEMORY))
        return Listing(tuple(found), tuple(rejected))

    def list_more(self, request: str) -> Listing:
        """See StateSource."""
        del request
        return Listing((), ())

    def open(self, saved_state: SavedState) -> OpenedState:
        """See StateSource."""
        client = self._slot_client
        snapshot = (
            client.find_snapshot(saved_state.version, saved_state.epoch) if client is not None else None
        )
        if (
            snapshot is None
            or to_saved_state(saved_state.owner_node, snapshot.manifest, MEMORY) != saved_state
        ):
            raise UnreadableError("the snapshot is no longer in this node's memory")
        return OpenedState(snapshot.manifest, StreamingBuffer.from_complete(snapshot.image), snapshot.slot)

    def find_reader(self, key: str) -> None:
        """See StateSource."""

    def name_of(self, saved_state: SavedState) -> str:
        """See StateSource."""
        return f"{reader.checkpoint_name(*saved_state.version)} (in memory)"

    def give_up(self, saved_state: SavedState, reason: str) -> None:
        """See StateSource."""
        del reason
        with contextlib.suppress(
            CheckpointError
        ):  # it is not there any more, or the next listing discards it
            opened = self.open(saved_state)
            if self._slot_client is not None and opened.slot is not None:
                self._slot_client.discard(opened.slot.index)


class DiskSource:
    """The checkpoints of this node, and on rank 0's node those of others on a shared file system."""

    tier = DISK

    def __init__(self, context: RankContext, slot_client: SlotClient | None) -> None:
        self._context = context
        self._slot_client = slot_client

    def list_states(self, held: Sequence[SavedState] = ()) -> Listing:
        """List checkpoints; quarantine damaged ones.

        A damaged checkpoint lacks a file, is truncated or has an invalid manifest. Checkpoints that are
        unreadable now, of a newer format or of another job stay in place.

        Rank 0's node also lists the directories of other nodes that it sees on a shared file system, because
        a job may restart on other machines. It never writes there. No other node does this, to limit the load
        on the file server. With ``--resume never`` only the generations of those states count, since an
        absent node has not moved its earlier run aside.
        """
        del held
        context = self._context
        for entry in context.catalog.list_entries():
            if entry.is_damaged:
                context.quarantine(entry.path, str(entry.error))
        entries_by_owner = {context.node: context.catalog.list_entries()}
        limit = MAX_LISTED_STATES if context.settings.resume_from is None else MAX_ENTRIES
        is_first, run_id = context.collectives.rank == 0, context.settings.run_id
        visible = scan_run(context.run_dir, run_id, limit) if is_first else {}
        if context.settings.resume != "never":
            entries_by_owner = visible | entries_by_owner
        saved_states: list[SavedState] = []
        rejected: list[RejectedState] = []
        for owner, entries in entries_by_owner.items():
            for entry in entries[:limit]:
                if entry.manifest is not None and entry.error is None:
                    state = to_saved_state(owner, entry.manifest)
                    saved_states.append(replace(state, milestones=entry.milestones))
            rejected += self._list_rejected(owner, entries)
        seen = [
            e.generation for each in visible.values() for e in each if not isinstance(e.error, ForeignError)
        ]
        return Listing(tuple(saved_states), tuple(rejected), max(seen, default=0))

    def list_more(self, request: str) -> Listing:
        """See StateSource."""
        del request
        return Listing((), ())

    def open(self, saved_state: SavedState) -> OpenedState:
        """Read the checkpoint into a slot; without a free one, and on other ranks, map it."""
        context = self._context
        path = context.checkpoint_path(saved_state)
        manifest = reader.quick_check(path, context.settings.run_id)
        on_disk = saved_state.owner_node == context.node
        reserved = reserve_slot(self._slot_client, manifest) if context.is_local_leader else None
        fill: Callable[[], object]
        if reserved is not None:
            buffer, slot, populate = reserved
            # Populate pages ahead of the data: 1 us a page, against 8 us for a fault at the first write.
            tasks = [BackgroundTask("populate", populate)]
            fill = functools.partial(reader.read_image, path, manifest, buffer.memory, buffer.advance)
        else:
            mapping = reader.map_unverified(path, manifest)  # the mapping needs no memory of its own
            buffer, slot, tasks = StreamingBuffer(memoryview(mapping), LocalWatermark()), None, []
            fill = functools.partial(reader.verify_mapping, path, manifest, mapping, buffer.advance)
        tasks.append(BackgroundTask("fill", fill, buffer))
        return OpenedState(manifest, buffer, slot, slot is not None, on_disk, tuple(tasks))

    def find_reader(self, key: str) -> None:
        """See StateSource."""

    def name_of(self, saved_state: SavedState) -> str:
        """See StateSource."""
        return reader.checkpoint_name(*saved_state.version)

    def give_up(self, saved_state: SavedState, reason: str) -> None:
        """Quarantine a checkpoint of this node, unless a link leads to it."""
        path = self._context.checkpoint_path(saved_state)
        if saved_state.owner_node == self._context.node and not path.is_symlink():
            self._context.quarantine(path, reason)

    def _list_rejected(self, owner_node: str, entries: Sequence[CatalogEntry]) -> list[RejectedState]:
        rejected = [
            RejectedState(
                owner_node,
                entry.path.name,
                str(entry.error),
                entry.version,
                entry.error.kind,
                _read_milestone_names(entry.path),
            )
            for entry in entries
            if entry.error is not None
        ]
        for path in Catalog(self._context.run_dir / owner_node, None).list_quarantined():
            version = reader.parse_checkpoint_name(path.name.split(".")[0]) or (0, 0)
            reason = read_quarantine_reason(path)
            names = _read_milestone_names(path)
            rejected.append(RejectedState(owner_node, path.name, reason, version, ASIDE, names))
        return rejected


def _read_milestone_names(path: Path) -> tuple[str, ...]:
    return tuple(label.name for label in read_milestones(path))


class ArchiveSource:
    """The archived checkpoints of this run.

    Rank 0's node alone lists them. It opens one, and a few other nodes help it to read: each block is read by
    one of them, and passed on. So the archive is read once, whatever the number of nodes. A restore deletes
    nothing there.

    A restart within the job is faster than a few answers of an object store. So rank 0 first asks, in a
    thread, only how new the archive is, with two requests. It reads entries if this node holds nothing as
    new, if a state has failed (`list_more`), or to go back.
    """

    tier = ARCHIVE

    def __init__(self, context: RankContext, slot_client: SlotClient | None) -> None:
        """Begin to ask how new the archive is."""
        self._context, self._slot_client = context, slot_client
        self._newest: Moment | None = None
        self._other_names: list[str] = []  # beside a run that has archived nothing
        self._query: BackgroundTask | None = None
        self._entries: dict[SavedState, ArchivedCheckpoint] = {}
        self._listed: set[int] = set()
        self._done: set[str] = set()
        if context.settings.archive and context.collectives.rank == 0:
            self._query = BackgroundTask("archive", self._find_newest)

    @functools.cached_property
    def _archive(self) -> Archive:
        settings = self._context.settings
        return open_archive(settings.archive or "", settings.run_id)

    def _find_newest(self) -> None:
        newest = self._archive.find_newest()
        if newest is not None and not any(newest):
            self._other_names = self._archive.list_other_names()
        self._newest = newest

    def list_states(self, held: Sequence[SavedState] = ()) -> Listing:
        """List the newest entries, if one of them is newer than all that this node holds.

        With ``--resume never`` none is to be resumed, but their generations count. If the archive cannot be
        reached, a job that has no other state waits for it; see `coordinator`.
        """
        if self._query is None:
            return Listing((), ())
        launcher, _ = node_dir.read_script_arguments(self._context.node_dir)
        if held and launcher == rank_context.launcher_id() and not self._query.has_ended_within(MAX_QUERY_S):
            logger.warning(
                "the archive does not answer within %.0f s, so only what nodes hold is resumed.", MAX_QUERY_S
            )
            return Listing((), ())
        error, newest = self._query.join(), self._newest
        if isinstance(error, ArchiveError):
            return self._describe_failure(error)
        if error is not None:
            raise error
        if newest is not None and not any(newest) and launcher != rank_context.launcher_id():
            self._log_that_it_is_empty()
        if newest is not None and self._has_nothing_newer(held, newest):
            return Listing((), (), newest[0])
        return self.list_more("")

    def _has_nothing_newer(self, held: Sequence[SavedState], newest: Moment) -> bool:
        """Return whether no entry is needed: none is there, none is wanted, or a node holds the newest."""
        is_empty = not any(newest)
        return is_empty or self._context.settings.resume == "never" or any(s.moment >= newest for s in held)

    def list_more(self, request: str) -> Listing:
        """See StateSource."""
        if self._query is None or request in self._done:
            return Listing((), ())
        try:
            numbers = set(self._archive.list_numbers()[:MAX_LISTED_STATES])
            if request:
                numbers |= set(
                    self._archive.find_numbers(
                        lambda header: going_back.may_mean(request, header.version, header.names)
                    )
                )
            found = self._archive.read_checkpoints(numbers - self._listed)
            for entry in found:
                if isinstance(entry, BadEntry) and isinstance(entry.error.__cause__, ArchiveError):
                    raise entry.error.__cause__  # it may be the newest
        except ArchiveError as error:
            return self._describe_failure(error)
        self._done |= {request, ""}
        self._listed |= numbers
        return self._describe(found)

    def _log_that_it_is_empty(self) -> None:
        """Log it at a start: with another run id or address it may not be."""
        others = ", ".join(self._other_names[:MAX_NAMES_SHOWN])
        has = f" It has: {others}." if others else ""
        settings = self._context.settings
        logger.info(f"the archive {settings.archive} has nothing of a run {settings.run_id!r} yet.{has}")

    def _describe(self, found: Sequence[ArchivedCheckpoint | BadEntry]) -> Listing:
        good = [entry for entry in found if isinstance(entry, ArchivedCheckpoint)]
        newest = max((entry.manifest.generation for entry in good), default=0)
        if self._context.settings.resume == "never":
            return Listing((), (), newest)
        # One of unknown version may be newer than all that can be read.
        unknown = (newest, MAX_UNKNOWN_STEP)
        rejected = [
            RejectedState(
                self._context.node,
                f"entry {e.number} of the archive",
                str(e.error),
                e.version or (unknown if e.error.kind == NewerFormatError.kind else (0, 0)),
                e.error.kind,
                e.milestones,
            )
            for e in found
            if isinstance(e, BadEntry)
        ]
        states = {_to_archived_state(entry): entry for entry in good}
        self._entries |= states
        return Listing(tuple(states), tuple(rejected), newest)

    def _describe_failure(self, error: ArchiveError) -> Listing:
        rejected = RejectedState(
            self._context.node, "the archive", str(error), kind="unreadable", archive_error=error.kind
        )
        return Listing((), (rejected,))

    def open(self, saved_state: SavedState) -> OpenedState:
        """Read the header, into a slot or into private memory without a free one.

        The result's ``reader`` reads the rest.
        """
        reader = ArchiveReader(self._archive, self._find(saved_state))
        manifest = reader.archived.manifest
        reserved = reserve_slot(self._slot_client, manifest) if self._context.is_local_leader else None
        tasks = []
        if reserved is not None:
            buffer, slot, populate = reserved
            tasks.append(BackgroundTask("populate", populate))
        else:
            memory = allocate_memory(manifest.file_bytes)
            buffer, slot = StreamingBuffer(memory, LocalWatermark()), None
        reader.read_header(buffer)
        return OpenedState(manifest, buffer, slot, slot is not None, tasks=tuple(tasks), reader=reader)

    def find_reader(self, key: str) -> BlockReader | None:
        """See StateSource. A node without an archive reads nothing; it may be of an earlier configuration."""
        if not self._context.settings.archive:
            return None
        number, _ = key.split("/")
        reader = ArchiveReader(self._archive, self._archive.read_entry(int(number)))
        return reader if reader.key == key else None

    def name_of(self, saved_state: SavedState) -> str:
        """See StateSource."""
        return f"{reader.checkpoint_name(*saved_state.version)} (in the archive)"

    def give_up(self, saved_state: SavedState, reason: str) -> None:
        """Leave it there: another job, or a person, may still need what is whole of it."""
        del reason
        logger.warning("%s is damaged, and stays where it is.", self.name_of(saved_state))

    def _find(self, saved_state: SavedState) -> ArchivedCheckpoint:
        """Return the entry of a state that rank 0 has listed; raise CheckpointError if it is gone."""
        if saved_state in self._entries:
            return self._entries[saved_state]
        try:
            numbers = self._archive.find_numbers(lambda header: header.moment == saved_state.moment)
        except ArchiveError as error:
            raise UnreadableError(str(error)) from error
        for number in numbers:
            return self._archive.read_entry(number)
        raise TornError(f"{self.name_of(saved_state)} is not there any more")


class ArchiveReader:
    """Reads the blocks of an archived checkpoint."""

    def __init__(self, archive: Archive, archived: ArchivedCheckpoint) -> None:
        self._archive, self.archived = archive, archived
        self.key = f"{archived.number}/{archived.header.parts}"

    def read_block(self, index: int, into: memoryview) -> bytes:
        """See BlockReader."""
        self._archive.read_block(self.archived, index, into)
        return bytes.fromhex(self.archived.manifest.blocks[index])

    def read_header(self, buffer: StreamingBuffer) -> None:
        """Read blocks until the header is complete: the nodes compare it before they share the rest."""
        step, size = self.archived.manifest.block_bytes, len(buffer.memory)
        for start in range(0, size, step):
            self.read_block(start // step, buffer.memory[start : start + step])
            buffer.advance(min(start + step, size))
            if header_size(buffer.memory[:8], size) <= start + step:
                break


def _to_archived_state(entry: ArchivedCheckpoint) -> SavedState:
    state = to_saved_state(entry.manifest.node, entry.manifest, ARCHIVE)
    return replace(state, milestones=entry.header.milestones)


def take_inventory(
    context: RankContext,
    sources: Mapping[str, StateSource],
    progress_page: ProgressPage,
    recorded_generation: int,
) -> Inventory:
    """List what this node could restore from its ``sources``; give up what is damaged.

    ``recorded_generation`` is the greatest of which this node was a part; its states may be of older ones.
    """
    listings: list[Listing] = []
    for source in sources.values():
        listings.append(source.list_states([state for each in listings for state in each.saved_states]))
    # Generations that ended before their first step left nothing on disk, but agents have counted them.
    own_generation = max(recorded_generation, rank_context.assigned_generation() - 1)
    last_generation, last_step, last_world_size = progress_page.newest_progress(recorded_generation)
    last_launcher, command = node_dir.read_script_arguments(context.node_dir)
    return Inventory(
        node=context.node,
        local_leader_rank=context.collectives.rank,
        saved_states=tuple(state for each in listings for state in each.saved_states),
        rejected=tuple(state for each in listings for state in each.rejected),
        generation=max([own_generation, *(each.newest_generation for each in listings)]),
        own_generation=own_generation,
        resume_from=context.settings.resume_from or "",
        committed_generation=node_dir.read_committed_generation(context.node_dir),
        archive=context.settings.archive,
        last_step=last_step,
        last_generation=last_generation,
        last_world_size=last_world_size or None,
        has_restarted=last_launcher == rank_context.launcher_id(),
        command=tuple(command),
        notes=make_notes(context.node_dir),
    )


def take_further_inventory(
    context: RankContext, sources: Mapping[str, StateSource], request: str
) -> Inventory:
    """List what `take_inventory` has left out; see `StateSource.list_more`."""
    listings = [source.list_more(request) for source in sources.values()]
    return Inventory(
        node=context.node,
        local_leader_rank=context.collectives.rank,
        saved_states=tuple(state for each in listings for state in each.saved_states),
        rejected=tuple(state for each in listings for state in each.rejected),
        generation=max(each.newest_generation for each in listings),
    )


def open_for_peers(slot_client: SlotClient | None, source_manifest: Manifest) -> OpenedState:
    """Return an empty buffer for a state that other nodes send; in a slot, if one is free."""
    reserved = reserve_slot(slot_client, source_manifest)
    if reserved is not None:
        return OpenedState(source_manifest, *reserved[:2], fills_slot=True)
    memory = allocate_memory(source_manifest.file_bytes)
    return OpenedState(source_manifest, StreamingBuffer(memory, LocalWatermark()))


def reserve_slot(
    client: SlotClient | None, manifest: Manifest
) -> tuple[StreamingBuffer, Slot, Callable[[], object]] | None:
    """Reserve a slot for a state that arrives; return its buffer, the slot and what maps its pages.

    Return None if the node has no free slot.
    """
    slot = client.acquire_slot(manifest) if client is not None else None
    if slot is None or client is None:
        return None
    buffer = StreamingBuffer(slot.memory[: manifest.file_bytes], slot)
    return buffer, slot, functools.partial(client.populate, slot)


def to_saved_state(owner_node: str, manifest: Manifest, tier: str = DISK) -> SavedState:
    """Describe the state of a manifest."""
    position = manifest.position
    return SavedState(
        owner_node,
        *manifest.version,
        manifest.rank,
        tier,
        manifest.file_bytes,
        position.epoch,
        position.step_in_epoch,
        ways_back=manifest.ways_back,
    )
