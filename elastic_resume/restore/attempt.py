"""Load the chosen state on every rank, and report the sources that failed.

Afterwards either every rank has loaded the state, or every rank knows which nodes' states failed.

The local leader of each node brings the bytes of the state into its node's memory. All ranks of the node load
each tensor as soon as all its bytes are below the watermark (`streaming.py`). The bytes come from the node's
own memory or disk (`sources.py`), or from other nodes: threads receive blocks into a slot and verify them
(`transfer.py`). A few nodes help the source to read an archived state. Meanwhile the local leader of each
node that holds or receives the state serves it.

If no slot is free, the local leader and each other rank map the checkpoint. If the node has none, its local
leader receives the state into private memory, and commits it to disk when all ranks have loaded. The node's
other ranks then read the committed checkpoint.

Parameters and optimizer state are equal in all states. Other state may differ between ranks: BatchNorm's
buffers, schedulers, other tracked objects. All ranks load the source's values of it (`SourceValues`). A
thread on every rank broadcasts them while the ranks load, into separate memory: the node's state stays
unchanged. A node that has received blocks of several states puts these values into its own in the end, so
that it equals the source's.

Invariants:

- A state that fails, at any moment, is reported to all ranks at the end of the attempt, and no rank waits for
  it.
- A failed attempt may have loaded some tensors. The next plan overwrites them, and nothing trains before
  that.
- A slot counts as a snapshot only when its bytes are complete and all ranks have loaded.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash
from torch import Tensor, nn

from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import allocate_memory
from elastic_resume.checkpoint.shards import shard_index
from elastic_resume.checkpoint.writer import CheckpointWriter
from elastic_resume.console import ByteProgress
from elastic_resume.errors import (
    CheckpointError,
    CorruptError,
    ElasticResumeError,
    MachineError,
    PeerFailedError,
    TornError,
    UnreadableError,
)
from elastic_resume.policy import resume_plan
from elastic_resume.policy.resume_plan import MEMORY, ResumePlan, SavedState, Senders
from elastic_resume.ranks.rank_context import RankContext, raise_if_set
from elastic_resume.restore import transfer
from elastic_resume.restore.sources import OpenedState, StateSource, list_sources, open_for_peers
from elastic_resume.restore.streaming import (
    BackgroundTask,
    LocalWatermark,
    Prefetcher,
    StreamingBuffer,
    broadcast_buffer,
    is_local_state_error,
)
from elastic_resume.restore.transfer import (
    BlockReader,
    BlockSender,
    BlockServer,
    BlockTable,
    SharedReading,
)
from elastic_resume.restore.warm_memory import TensorPool
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.state import load_objects
from elastic_resume.units import format_bytes

logger = logging.getLogger(__name__)

PROVEN_INVALID_KINDS = {TornError.kind, CorruptError.kind}
_MIN_PREFETCH_BYTES = 8 << 20  # prefetching a smaller state costs more than it saves

NodeFailures = Mapping[str, tuple[str, str]]  # node -> kind of CheckpointError, reason


# ---- values that all ranks take from the source ------------------------------------------------------


def build_values_layout(layout: Layout, names: Sequence[str]) -> Layout:
    """Lay out the tensors ``names`` of ``layout`` alone. Raises CorruptError if it has no such tensor."""
    try:
        extents = {name: layout.extents[name] for name in names}
    except KeyError as error:
        raise CorruptError(f"the manifest names a tensor that the state file lacks: {error}.") from error
    return Layout.build(TensorSpec(name, extent.dtype, extent.shape) for name, extent in extents.items())


class SourceValues(StreamingBuffer):
    """The source's values of some tensors, while they arrive. The header is there from the beginning."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(allocate_memory(layout.total_bytes), LocalWatermark())
        self.memory[: len(layout.header)] = layout.header
        self.names = frozenset(layout.extents)
        self.advance(len(layout.header))

    def fail(self, error: BaseException) -> None:
        """See StreamingBuffer. Values that do not arrive say nothing about this rank's own state."""
        super().fail(PeerFailedError(f"the values that all ranks load did not arrive: {error}"))

    def copy_from(self, buffer: StreamingBuffer) -> None:
        """On the source: copy the tensors from ``buffer`` as they arrive there. Raises its errors."""
        for name, extent in self.layout.extents.items():
            self.memory[extent.start : extent.stop] = buffer.tensor_bytes(name)
            self.advance(extent.stop)


# ---- the attempt -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedState:
    """A state that all ranks have loaded."""

    manifest: Manifest  # of the source
    opened: OpenedState | None  # None on a rank that read what its local leader had committed

    @property
    def on_disk(self) -> bool:
        """Whether this node's own disk holds the fully verified state; false where nothing was opened."""
        return self.opened is not None and self.opened.on_disk

    def publish_slot(self, client: SlotClient | None) -> None:
        """Make the filled slot this node's snapshot; on the local leader that filled it."""
        opened = self.opened
        if opened is None or not opened.fills_slot:
            return
        if client is not None and opened.slot is not None and opened.manifest is not None:
            client.finish_fill(opened.slot, opened.manifest, on_disk=opened.on_disk)


@dataclass
class _StateLoader:
    """Loads buffers into this rank's tracked objects, with the source's values of some tensors."""

    tracked: Mapping[str, Any]
    manifest: Manifest
    values: SourceValues
    tensor_pool: TensorPool
    local_rank: int
    loaded_bytes: int = 0  # for the display of progress

    def load(self, buffer: StreamingBuffer) -> None:
        """Load ``buffer`` while it arrives. Raises its errors, and MismatchError."""
        tracked, values, extents = self.tracked, self.values, buffer.layout.extents
        # Modules copy tensors into their own memory; other objects keep the tensors that they are given.
        keepers = tuple(f"{name}/" for name, item in tracked.items() if not isinstance(item, nn.Module))
        names = [
            name
            for name in extents
            if name.startswith(keepers)
            and shard_index(name) in {None, self.local_rank}  # the others are read on demand, if at all
        ]
        is_large = sum(extents[name].stop - extents[name].start for name in names) > _MIN_PREFETCH_BYTES

        def buffer_of(name: str) -> StreamingBuffer:
            return values if name in values.names else buffer

        def count(tensor: Tensor) -> Tensor:
            self.loaded_bytes += tensor.nbytes
            return tensor

        prefetcher = Prefetcher(
            names if is_large else (), lambda name: self.tensor_pool.copy(buffer_of(name).get_tensor(name))
        )
        try:
            load_objects.load_into(
                tracked,
                self.manifest.state,
                lambda name: count(buffer_of(name).get_tensor(name)),
                peek_tensor=lambda name: buffer_of(name).peek_tensor(name),
                make_tensor=lambda name: count(prefetcher.make_tensor(name)),
            )
        finally:
            prefetcher.close()


@dataclass(frozen=True)
class _Exchange:
    """What a local leader serves to other nodes, and how its node receives.

    ``opened`` replaces what the node had opened itself. ``commits_received``: some node received without a
    slot, and commits before its other ranks load.
    """

    opened: OpenedState | None
    server: BlockServer | None = None
    commits_received: bool = False


class RestoreAttempt:
    """One attempt of all ranks to load the state of a plan: open, exchange, load, compare notes."""

    def __init__(
        self,
        context: RankContext,
        plan: ResumePlan,
        slot_client: SlotClient | None,
        tensor_pool: TensorPool | None = None,
        sources: Mapping[str, StateSource] | None = None,
    ) -> None:
        self._context = context
        self._plan = plan
        self._slot_client = slot_client
        self._tensor_pool = tensor_pool or TensorPool()
        self._sources = sources or list_sources(context, slot_client)
        self._saved_state = plan.saved_state_for(context.node)  # None: this node receives the state
        self._tasks: list[BackgroundTask] = []
        self._errors: list[ElasticResumeError] = []  # of this rank, reported when all ranks have loaded

    def run(self, tracked: Mapping[str, Any]) -> tuple[LoadedState | None, NodeFailures]:
        """Load the state into ``tracked``; return it, or None and the states that failed.

        Raises:
            MismatchError: the objects do not fit; nothing was loaded.
            ElasticResumeError: a node could not receive the state.

        """
        context, plan = self._context, self._plan
        opened, failures = self._open()
        if failures:
            self._cancel(opened)
            return None, failures
        described = context.collectives.broadcast_json(self._describe_source(opened), plan.source_rank)
        manifest = Manifest.parse(described[0].encode())
        values = SourceValues(_parse_values_layout(described[1], described[2], plan.nbytes))
        exchange = _Exchange(opened)
        loader = _StateLoader(tracked, manifest, values, self._tensor_pool, context.local_rank)
        try:
            if plan.receiving_nodes:
                exchange = self._start_exchange(opened, manifest, described[3])
            elif opened is not None:
                self._read_alone(opened)
            self._start_source_values(exchange.opened, values)
            with self._show_progress(exchange, loader):
                self._load_and_join_tasks(exchange.opened, loader)
                failures = self._gather_failures()  # nobody receives any more
        finally:
            if exchange.server is not None:
                exchange.server.close()
        if failures:
            return None, failures
        return LoadedState(manifest, self._keep_received(exchange, loader)), {}

    def _cancel(self, opened: OpenedState | None) -> None:
        """Stop and join the threads."""
        if opened is not None:
            opened.buffer.cancel()
        for task in self._tasks:
            task.join()

    # ---- open ------------------------------------------------------------------------------------------

    def _open(self) -> tuple[OpenedState | None, NodeFailures]:
        """Start to bring this node's state into its memory; return it, and all nodes' failed states."""
        context, saved_state = self._context, self._saved_state
        opened: OpenedState | None = None
        failure: CheckpointError | None = None
        header_digest = None
        if saved_state is not None and context.is_local_leader:
            try:
                opened = self._open_own(saved_state)
                header_digest = xxhash.xxh3_128_hexdigest(opened.buffer.layout.header)
            except CheckpointError as error:
                failure = error
            except (OSError, MemoryError) as error:
                where = context.checkpoint_path(saved_state)
                failure = UnreadableError(f"{where}: cannot be read now ({error!r})")
        offers = context.collectives.gather([_encode_failure(failure), header_digest, _slot_id(opened)])
        failures = self._group_failures_by_node([encoded for encoded, _, _ in offers])
        if failures:
            return opened, failures
        expected = offers[self._plan.source_rank][1]
        reason = f"its tensors are laid out unlike those of {self._plan.source_node}"
        failures = {
            context.node_by_rank[rank]: ("unlike", reason)
            for rank, (_, digest, _) in enumerate(offers)
            if digest not in {None, expected}
        }
        if not context.is_local_leader:
            opened = self._attach(offers[context.local_leader_by_node[context.node]][2])
        return opened, failures

    def _open_own(self, saved_state: SavedState) -> OpenedState:
        opened = self._sources[saved_state.tier].open(saved_state)
        self._tasks += opened.tasks
        if self._plan.nbytes != saved_state.nbytes or len(opened.buffer.memory) != saved_state.nbytes:
            found = len(opened.buffer.memory)
            raise UnreadableError(f"{saved_state.nbytes} bytes were expected, and {found} were found")
        if opened.manifest is not None:
            build_values_layout(opened.buffer.layout, opened.manifest.rank0_tensors)  # for its error
        return opened

    def _attach(self, slot_id: list[int] | None) -> OpenedState | None:
        """On ranks that are not local leader: map the slot that the leader fills, or else the checkpoint."""
        try:
            if slot_id is not None:
                return self._map_leader_slot(*slot_id)
            if self._saved_state is not None:
                return self._open_own(self._saved_state)
        except ElasticResumeError as error:
            self._errors.append(error)  # reported at the end: the other ranks are about to load
        return None

    def _map_leader_slot(self, index: int, serial: int) -> OpenedState:
        client = self._slot_client
        slot = client.map_slot(index, serial) if client is not None else None
        if slot is None:
            raise MachineError(
                f"rank {self._context.collectives.rank} cannot map the snapshots of its node "
                f"{self._context.node}, and its local leader can: raise the limits of open files and of the "
                "address space (ulimit -n, ulimit -v)."
            )
        complete = self._saved_state is not None and self._saved_state.tier == MEMORY
        nbytes = self._plan.nbytes
        return OpenedState(
            None,
            StreamingBuffer(
                slot.memory[:nbytes],
                LocalWatermark(nbytes) if complete else slot,
                is_filled_elsewhere=not complete,
            ),
        )

    # ---- exchange between nodes ------------------------------------------------------------------------

    def _describe_source(self, opened: OpenedState | None) -> list[Any] | None:
        """On the source: return its manifest without digests, its own values' layout and its reader's key."""
        if self._context.collectives.rank != self._plan.source_rank:
            return None
        if opened is None or opened.manifest is None:
            raise UnreadableError("the source has opened no state")
        # Ranks that load the same state have the same values.
        names = opened.manifest.rank0_tensors if len(self._plan.holders) > 1 else ()
        layout = build_values_layout(opened.buffer.layout, names)
        # Digests travel with their blocks, and the plan has the size.
        described = replace(opened.manifest, blocks=(), file_bytes=0)
        key = opened.reader.key if opened.reader else ""
        return [described.to_bytes().decode(), layout.header.decode("latin-1"), layout.total_bytes, key]

    def _start_exchange(
        self, opened: OpenedState | None, source_manifest: Manifest, reader_key: str
    ) -> _Exchange:
        """Serve and receive the state on local leaders; map the slots that they fill on the other ranks."""
        context, plan = self._context, self._plan
        server: BlockServer | None = None
        reader: BlockReader | None = None
        if context.is_local_leader:
            try:
                if opened is None:
                    received = replace(source_manifest, node=context.node, file_bytes=plan.nbytes)
                    opened = open_for_peers(self._slot_client, received)
                server = self._serve(opened, source_manifest.block_bytes)
                reader = opened.reader or self._find_reader(reader_key, server.table.count)
            except ElasticResumeError as error:
                self._errors.append(error)  # reported at the end: the other ranks are about to gather
                if opened is not None:
                    opened.buffer.fail(error)
        served = server.sender.to_json() if server is not None else None
        offers = context.collectives.gather([_slot_id(opened), served, reader is not None])
        slot_ids = {node: offers[context.local_leader_by_node[node]][0] for node in plan.receiving_nodes}
        if server is not None and (self._saved_state is None or reader is not None):
            senders = {
                node: BlockSender.from_json(node, offers[rank][1])
                for node, rank in context.local_leader_by_node.items()
                if node != context.node and offers[rank][1] is not None
            }
            others = [node for node, rank in context.local_leader_by_node.items() if offers[rank][2]]
            readers = sorted(others, key=lambda node: node != plan.source_node)
            receive = functools.partial(self._receive, server.table, senders, reader, readers)
            self._tasks.append(BackgroundTask("receive", receive, server.table.buffer))
        elif slot_ids.get(context.node) is not None:
            opened = self._attach(slot_ids[context.node])
        elif opened is not None and not context.is_local_leader:
            self._read_alone(opened)
        return _Exchange(opened, server, commits_received=None in slot_ids.values())

    def _find_reader(self, key: str, blocks: int) -> BlockReader | None:
        """Return the reader with which this node helps the source; None if it does not help."""
        plan = self._plan
        if not key or self._context.node not in resume_plan.plan_readers(plan, blocks):
            return None
        try:
            return self._sources[plan.source_tier].find_reader(key)
        except CheckpointError as error:
            transfer.warn_that_others_read(error)
            return None

    def _read_alone(self, opened: OpenedState) -> None:
        """Read the rest of a state, if nothing brings it yet, without other nodes."""
        reader = opened.reader
        if reader is not None and opened.manifest is not None:
            table = BlockTable(opened.buffer, opened.manifest.block_bytes, opened.manifest.blocks)
            shared = SharedReading(reader, (None,))
            read = functools.partial(transfer.receive, table, (), 0, shared)
            self._tasks.append(BackgroundTask("read", read, opened.buffer))

    def _serve(self, opened: OpenedState, block_bytes: int) -> BlockServer:
        manifest = opened.manifest
        digests = manifest.blocks if manifest is not None and manifest.block_bytes == block_bytes else ()
        host = transfer.choose_local_host(self._context.settings.transfer_addr)
        return BlockServer(BlockTable(opened.buffer, block_bytes, digests), self._context.node, host)

    def _receive(
        self,
        table: BlockTable,
        senders: Mapping[str, BlockSender],
        reader: BlockReader | None,
        readers: Sequence[str],
    ) -> None:
        """Receive the state from the nodes that the plan assigns to this one, and from those that read it.

        The first of ``readers`` is the source, if it can be reached at all.
        """
        context, plan = self._context, self._plan
        planned = resume_plan.plan_senders(plan).get(context.node, Senders((), ()))
        first, shared = planned.first, None
        if reader is not None and readers[0] == plan.source_node:
            first = tuple(node for node in readers if node in senders)
            shared = SharedReading(reader, tuple(senders.get(node) for node in readers))
        order = dict.fromkeys((*first, *planned.first, *planned.substitutes))
        known = [senders[node] for node in order if node in senders]
        names = [str(senders[node]) for node in first if node in senders]
        what = f"step {plan.step} ({format_bytes(plan.nbytes)})"
        logger.debug(f"node {context.node}: receiving {what} from {', '.join(names)}")
        transfer.receive(table, known, len(names), shared)

    def _start_source_values(self, opened: OpenedState | None, values: SourceValues) -> None:
        """Send or receive the source's values in a thread."""
        collectives, source_rank = self._context.collectives, self._plan.source_rank
        if not values.names:
            return
        send_or_receive = functools.partial(broadcast_buffer, collectives, values, source_rank)
        if collectives.rank == source_rank and opened is not None:
            collect = functools.partial(values.copy_from, opened.buffer)
            self._tasks.append(BackgroundTask("collect-values", collect, values))
            self._tasks.append(BackgroundTask("values", send_or_receive))
        else:
            self._tasks.append(BackgroundTask("values", send_or_receive, values))

    # ---- load ------------------------------------------------------------------------------------------

    def _show_progress(
        self, exchange: _Exchange, loader: _StateLoader
    ) -> contextlib.AbstractContextManager[object]:
        """Show the progress of this node within the context; its local leader does."""
        plan, node, saved_state = self._plan, self._context.node, self._saved_state
        if not self._context.is_local_leader or exchange.opened is None:
            return contextlib.nullcontext()
        buffer, server = exchange.opened.buffer, exchange.server
        arrives = buffer.arrived_bytes() < len(buffer.memory)
        if saved_state is None:
            what = f"node {node}: receiving step {plan.step} from node {plan.source_node}"
        elif server is not None:
            what = f"node {node}: sending step {plan.step} to {', '.join(plan.receiving_nodes)}"
        else:
            what = f"node {node}: loading step {plan.step} from its {saved_state.tier}"

        def read_done() -> int:
            done = buffer.arrived_bytes() if arrives else loader.loaded_bytes
            return done if saved_state is None or server is None else min(done, server.sent_bytes)

        return ByteProgress(what, plan.nbytes, read_done)

    def _load_and_join_tasks(self, opened: OpenedState | None, loader: _StateLoader) -> None:
        """Load from the buffer and join all threads; keep their errors for `_gather_failures`."""
        if opened is not None:
            try:
                loader.load(opened.buffer)
            except ElasticResumeError as error:
                self._errors.append(error)
        for failure in filter(None, [task.join() for task in self._tasks]):
            if not isinstance(failure, ElasticResumeError):
                raise failure  # a peer is dead, so this generation ends
            self._errors.append(failure)

    def _keep_received(self, exchange: _Exchange, loader: _StateLoader) -> OpenedState | None:
        """Make a received image equal to the source's, and commit one that is in no slot."""
        opened, context, values = exchange.opened, self._context, loader.values
        receives = self._saved_state is None and context.is_local_leader
        if receives and opened is not None:
            for name, extent in opened.buffer.layout.extents.items():
                if name in values.names:
                    opened.buffer.memory[extent.start : extent.stop] = values.tensor_bytes(name)
        if not exchange.commits_received:
            return opened
        kept = context.run_on_all_ranks(lambda: self._commit_received(opened) if receives else opened)
        context.run_on_all_ranks(lambda: self._load_committed(opened, loader))
        return kept

    def _commit_received(self, opened: OpenedState | None) -> OpenedState | None:
        """Commit a state that was received into private memory, and return it."""
        context = self._context
        if opened is None or opened.slot is not None or opened.manifest is None:
            return opened
        writer = CheckpointWriter(context.node_dir, context.settings.run_id, context.events.emit)
        writer.commit(opened.manifest, [opened.buffer.memory])
        return replace(opened, on_disk=True)

    def _load_committed(self, opened: OpenedState | None, loader: _StateLoader) -> None:
        """On a rank whose local leader received without a slot: load the checkpoint that it has committed."""
        if opened is None:
            path = self._context.checkpoint_path(SavedState(self._context.node, *self._plan.version, 0))
            manifest = reader.quick_check(path, self._context.settings.run_id)
            loader.load(StreamingBuffer.from_complete(reader.map_image(path, manifest)))

    # ---- the outcome -----------------------------------------------------------------------------------

    def _gather_failures(self) -> NodeFailures:
        """Return the states that failed; raise errors that are no state's fault on all ranks."""
        # An error of this node's own state is more specific than what followed from it.
        error = min(self._errors, key=lambda error: not is_local_state_error(error), default=None)
        own = error if self._saved_state is not None and is_local_state_error(error) else None
        failures = self._group_failures_by_node(self._context.collectives.gather(_encode_failure(own)))
        if not failures:
            self._context.run_on_all_ranks(lambda: raise_if_set(error))
        return failures

    def _group_failures_by_node(self, failure_by_rank: Sequence[list[str] | None]) -> NodeFailures:
        failures: dict[str, tuple[str, str]] = {}
        for node, failure in zip(self._context.node_by_rank, failure_by_rank, strict=True):
            if failure is None:
                continue
            kind, reason = failure
            # A rank that proved the state invalid overrules a rank that could not read it.
            if node not in failures or kind in PROVEN_INVALID_KINDS:
                failures[node] = (kind, reason)
        return failures


def _slot_id(opened: OpenedState | None) -> list[int] | None:
    return [opened.slot.index, opened.slot.serial] if opened is not None and opened.slot is not None else None


def _parse_values_layout(header: str, nbytes: int, max_bytes: int) -> Layout:
    """Parse the layout of the source's values, which are part of a state of ``max_bytes``."""
    if not 0 < nbytes <= max_bytes:
        raise CorruptError(f"the source rank announced {nbytes} of {max_bytes} bytes of the state.")
    return Layout.parse(header.encode("latin-1"), nbytes)


def _encode_failure(error: ElasticResumeError | None) -> list[str] | None:
    return [error.kind, str(error)] if isinstance(error, CheckpointError) else None
