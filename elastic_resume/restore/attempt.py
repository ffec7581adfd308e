"""Load the chosen state on every rank, and report the sources that failed.

Afterwards either every rank has loaded the state, or every rank knows which nodes' copies failed.

The local leader of each node brings the bytes of the state into its node's memory. All ranks of the node load
each tensor as soon as the watermark (`streaming.py`) has passed it. The bytes come from one of three places:

- A snapshot in the node's memory: all bytes are there. They have no digest to check.
- A checkpoint on disk: threads read it into a slot and verify it.
- Other nodes: threads receive its blocks into a slot and verify them (`transfer.py`). Meanwhile the local
  leader of each node that holds or receives the state serves it.

If no slot is free, the local leader and each other rank map the checkpoint. If the node has none, its local
leader receives the state into private memory, and commits it to disk when all ranks have loaded. The node's
other ranks then read the committed checkpoint.

Parameters and optimizer state are equal in all copies. Other state may differ between ranks: BatchNorm's
buffers, schedulers, other tracked objects. All ranks load the source's values of it (`SourceValues`). A
thread on every rank broadcasts them while the ranks load, into separate memory: the node's copy stays
unchanged. A node that has received blocks of several copies puts these values into its own in the end, so
that it equals the source's.

Invariants:

- A copy that fails, at any moment, is reported to all ranks at the end of the attempt, and no rank waits for
  it.
- A failed attempt may have loaded some tensors. The next plan overwrites them, and nothing trains before
  that.
- A slot counts as a snapshot only when its bytes are complete and all ranks have loaded.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import xxhash
from torch import Tensor, nn

from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import allocate_memory
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
from elastic_resume.policy.resume_plan import MEMORY, ResumePlan, SavedState
from elastic_resume.ranks.rank_context import RankContext, raise_if_set
from elastic_resume.restore import transfer
from elastic_resume.restore.streaming import (
    BackgroundTask,
    LocalWatermark,
    Prefetcher,
    StreamingBuffer,
    broadcast_buffer,
    is_local_copy_error,
)
from elastic_resume.restore.transfer import BlockSender, BlockServer, BlockTable
from elastic_resume.slots.slot_memory import Slot
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
        """See StreamingBuffer. Values that do not arrive say nothing about this rank's own copy."""
        super().fail(PeerFailedError(f"the values that all ranks load did not arrive: {error}"))

    def copy_from(self, buffer: StreamingBuffer) -> None:
        """On the source: copy the tensors from ``buffer`` as they arrive there. Raises its errors."""
        for name, extent in self.layout.extents.items():
            self.memory[extent.start : extent.stop] = buffer.tensor_bytes(name)
            self.advance(extent.stop)


# ---- the attempt -------------------------------------------------------------------------------------


class RestoreAttempt:
    """One attempt, on one rank. All ranks call `open`, `load`, then `publish_slot` or `close`, together."""

    def __init__(self, context: RankContext, plan: ResumePlan) -> None:
        self.manifest: Manifest | None = None  # manifest of the source's copy; `load` sets it on every rank
        self.on_disk = False  # this node's own disk holds the verified copy
        self._context = context
        self._plan = plan
        self._slot_client = context.slot_client
        self._copy = plan.saved_state_for(context.node)
        self._local_manifest: Manifest | None = None  # manifest of this node's copy, read or received
        self._buffer: StreamingBuffer | None = None
        self._slot: Slot | None = None  # the slot from which this node's ranks load
        self._fills_slot = False  # the slot does not count as a snapshot yet
        self._error: ElasticResumeError | None = None  # error of this rank that is not reported yet
        self._commits_received = False  # some node received without a slot, and commits before others load
        # Layout of the values that all ranks take from the source, as this node's copy has them.
        self._values_layout = Layout.build(())
        self._source_values = SourceValues(self._values_layout)
        self._tasks: list[BackgroundTask] = []
        self._server: BlockServer | None = None  # on local leaders, if a node receives the state
        self._loaded_bytes = 0  # for the display of progress

    @property
    def tier(self) -> str:
        """The tier of this node's copy; "" if it has none."""
        return self._copy.tier if self._copy is not None else ""

    # ---- open ------------------------------------------------------------------------------------------

    def open(self) -> NodeFailures:
        """Start to bring this node's copy into its memory; return all nodes' copies that failed already."""
        failure: CheckpointError | None = None
        header_digest = None
        if self._copy is not None and self._context.is_local_leader:
            try:
                header_digest = self._open_copy(self._copy)
            except CheckpointError as error:
                failure = error
            except (OSError, MemoryError) as error:
                where = self._context.checkpoint_path(self._copy)
                failure = UnreadableError(f"{where}: cannot be read now ({error!r})")
        opened = self._context.collectives.gather([_encode_failure(failure), header_digest, self._slot_id()])
        failures = self._group_failures_by_node([encoded for encoded, _, _ in opened])
        if failures:
            return failures
        expected = opened[self._plan.source_rank][1]
        reason = f"its tensors are laid out unlike those of {self._plan.source_node}"
        failures = {
            self._context.node_by_rank[rank]: ("unlike", reason)
            for rank, (_, digest, _) in enumerate(opened)
            if digest not in {None, expected}
        }
        if not failures and self._copy is not None:
            self._attach_to_local_leader(opened[self._context.local_leader_by_node[self._context.node]][2])
        return failures

    def _open_copy(self, copy: SavedState) -> str:
        """Start to read this node's copy; return the digest of its header."""
        if copy.tier == MEMORY:
            self._open_snapshot(copy)
        else:
            self._open_checkpoint(copy)
        buffer = self._require_buffer()
        if self._plan.nbytes != copy.nbytes or len(buffer.memory) != copy.nbytes:
            raise UnreadableError(f"{copy.nbytes} bytes were expected, and {len(buffer.memory)} were found")
        if self._local_manifest is not None:
            self._values_layout = build_values_layout(buffer.layout, self._local_manifest.follows_rank0)
        return xxhash.xxh3_128_hexdigest(buffer.layout.header)

    def _open_snapshot(self, copy: SavedState) -> None:
        snapshot = self._slot_client.find_newest() if self._slot_client is not None else None
        if snapshot is None or (*snapshot.version, snapshot.manifest.position.epoch) != (
            *copy.version,
            copy.epoch,
        ):
            raise UnreadableError("the snapshot is no longer in this node's memory")
        self._local_manifest, self._slot = snapshot.manifest, snapshot.slot
        self._buffer = StreamingBuffer.from_complete(snapshot.image)

    def _open_checkpoint(self, copy: SavedState) -> None:
        path = self._context.checkpoint_path(copy)
        manifest = reader.quick_check(path, self._context.settings.run_id)
        self.on_disk = copy.owner_node == self._context.node
        self._local_manifest = manifest
        buffer = self._reserve_slot(manifest) if self._context.is_local_leader else None
        fill: Callable[[], object]
        slot, client = self._slot, self._slot_client
        if buffer is not None and slot is not None and client is not None:
            # Populate pages ahead of the data: 1 us a page, against 8 us for a fault at the first write.
            self._tasks.append(BackgroundTask("populate", lambda: client.populate(slot)))
            fill = functools.partial(reader.read_image, path, manifest, buffer.memory, buffer.advance)
        else:
            mapping = reader.map_unverified(path, manifest)  # the mapping needs no memory of its own
            buffer = StreamingBuffer(memoryview(mapping), LocalWatermark())
            fill = functools.partial(reader.verify_mapping, path, manifest, mapping, buffer.advance)
        self._buffer = buffer
        self._tasks.append(BackgroundTask("fill", fill, buffer))

    def _reserve_slot(self, manifest: Manifest) -> StreamingBuffer | None:
        """Reserve a slot for a state that arrives; None if the node has no free slot."""
        client = self._slot_client
        slot = client.acquire_slot(manifest) if client is not None else None
        if slot is None:
            return None
        self._slot, self._fills_slot = slot, True
        return StreamingBuffer(slot.memory[: manifest.file_bytes], slot)

    def _slot_id(self) -> list[int] | None:
        return [self._slot.index, self._slot.serial] if self._slot is not None else None

    def _attach_to_local_leader(self, slot_id: list[int] | None) -> None:
        """On ranks that are not local leader: map the slot that the leader fills, or else the checkpoint."""
        if self._context.is_local_leader:
            return
        try:
            if slot_id is not None:
                self._buffer = self._map_leader_slot(*slot_id)
            elif self._copy is not None:
                self._open_checkpoint(self._copy)
        except ElasticResumeError as error:
            self._error = error  # reported at the end: the other ranks are about to load

    def _map_leader_slot(self, index: int, serial: int) -> StreamingBuffer:
        slot = self._slot_client.map_slot(index, serial) if self._slot_client is not None else None
        if slot is None:
            raise MachineError(
                f"rank {self._context.collectives.rank} cannot map the snapshots of its node "
                f"{self._context.node}, and its local leader can: raise the limits of open files and of the "
                "address space (ulimit -n, ulimit -v)."
            )
        complete = self._copy is not None and self._copy.tier == MEMORY
        nbytes = self._plan.nbytes
        return StreamingBuffer(slot.memory[:nbytes], LocalWatermark(nbytes) if complete else slot)

    # ---- load ------------------------------------------------------------------------------------------

    def load(self, tracked: Mapping[str, Any]) -> NodeFailures:
        """Load the state into ``tracked`` while it arrives; return the copies that failed.

        Raises:
            MismatchError: the objects do not fit; nothing was loaded.
            ElasticResumeError: a node could not receive the state.

        """
        context, plan = self._context, self._plan
        described = context.collectives.broadcast_json(self._describe_source(), plan.source_rank)
        self.manifest = Manifest.parse(described[0].encode())
        self._source_values = SourceValues(_parse_values_layout(described[1], described[2], plan.nbytes))
        try:
            if plan.receiving_nodes:
                self._start_transfer(self.manifest)
            self._start_source_values()
            with self._show_progress():
                self._load_and_join_tasks(tracked, self.manifest)
                failures = self._gather_failures()  # nobody receives any more
        finally:
            if self._server is not None:
                self._server.close()
        if not failures:
            self._keep_received(tracked)
        return failures

    def _show_progress(self) -> contextlib.AbstractContextManager[object]:
        """Show the progress of this node within the context; its local leader does."""
        plan, node, buffer = self._plan, self._context.node, self._buffer
        if not self._context.is_local_leader or buffer is None:
            return contextlib.nullcontext()
        arrives = buffer.arrived_bytes() < len(buffer.memory)
        if self._copy is None:
            what = f"node {node}: receiving step {plan.step} from node {plan.source_node}"
        elif self._server is not None:
            what = f"node {node}: sending step {plan.step} to {', '.join(plan.receiving_nodes)}"
        else:
            place = "its memory" if self._copy.tier == MEMORY else "its disk"
            what = f"node {node}: loading step {plan.step} from {place}"

        def read_done() -> int:
            done = buffer.arrived_bytes() if arrives else self._loaded_bytes
            return done if self._copy is None or self._server is None else min(done, self._server.sent_bytes)

        return ByteProgress(what, plan.nbytes, read_done)

    def publish_slot(self) -> None:
        """Make the filled slot this node's snapshot, after all ranks have loaded."""
        client, slot, manifest = self._slot_client, self._slot, self._local_manifest
        if self._fills_slot and client is not None and slot is not None and manifest is not None:
            client.finish_fill(slot, manifest, on_disk=self.on_disk)

    def discard_snapshot(self) -> None:
        """Invalidate the snapshot in this node's memory, which proved invalid."""
        if self._slot is not None and self._slot_client is not None:
            self._slot_client.discard(self._slot.index)

    def close(self) -> None:
        """Cancel the attempt, and join its threads."""
        if self._buffer is not None:
            self._buffer.cancel()
        for task in self._tasks:
            task.join()

    def _describe_source(self) -> list[Any] | None:
        """On the source: return its manifest without digests, and the description of its own values."""
        if self._context.collectives.rank != self._plan.source_rank or self._local_manifest is None:
            return None
        # Ranks that load the same copy have the same values.
        layout = self._values_layout if len(self._plan.holders) > 1 else Layout.build(())
        header = layout.header.decode("latin-1")
        # Digests travel with their blocks, and the plan has the size.
        manifest = replace(self._local_manifest, blocks=(), file_bytes=0)
        return [manifest.to_bytes().decode(), header, layout.total_bytes]

    def _start_source_values(self) -> None:
        """Send or receive the source's values in a thread."""
        values, source_rank = self._source_values, self._plan.source_rank
        collectives = self._context.collectives
        if collectives.size == 1 or not values.names:
            return
        send_or_receive = functools.partial(broadcast_buffer, collectives, values, source_rank)
        if collectives.rank == source_rank:
            buffer = self._require_buffer()
            self._tasks.append(BackgroundTask("collect-values", lambda: values.copy_from(buffer), values))
            self._tasks.append(BackgroundTask("values", send_or_receive))
        else:
            self._tasks.append(BackgroundTask("values", send_or_receive, values))

    def _start_transfer(self, source_manifest: Manifest) -> None:
        """Serve and receive the state on local leaders; map the slots that they fill on the other ranks."""
        context, plan = self._context, self._plan
        if context.is_local_leader:
            try:
                if self._copy is None:
                    self._prepare_to_receive(source_manifest)
                self._server = self._serve(source_manifest.block_bytes)
            except ElasticResumeError as error:
                self._error = error  # reported at the end: the other ranks are about to gather
                if self._copy is None and self._buffer is not None:
                    self._buffer.fail(error)
        served = self._server.sender.to_json() if self._server is not None else None
        offers = context.collectives.gather([self._slot_id(), served])
        for node in plan.receiving_nodes:
            slot_id = offers[context.local_leader_by_node[node]][0]
            self._commits_received |= slot_id is None
            if node == context.node and slot_id is not None:
                self._attach_to_local_leader(slot_id)
        if self._copy is None and self._server is not None:
            receive = functools.partial(self._receive, self._server.table, [served for _, served in offers])
            self._tasks.append(BackgroundTask("receive", receive, self._server.table.buffer))

    def _prepare_to_receive(self, source_manifest: Manifest) -> None:
        nbytes = self._plan.nbytes
        self._local_manifest = replace(source_manifest, node=self._context.node, file_bytes=nbytes)
        buffer = self._reserve_slot(self._local_manifest)
        self._buffer = buffer or StreamingBuffer(allocate_memory(nbytes), LocalWatermark())

    def _serve(self, block_bytes: int) -> BlockServer:
        manifest = self._local_manifest
        same_blocks = manifest is not None and manifest.block_bytes == block_bytes
        digests = manifest.blocks if manifest is not None and same_blocks else ()
        host = transfer.choose_local_host(self._context.settings.transfer_addr)
        return BlockServer(BlockTable(self._require_buffer(), block_bytes, digests), self._context.node, host)

    def _receive(self, table: BlockTable, served_by_rank: Sequence[Any]) -> None:
        """Receive the state from the nodes that the plan assigns to this one."""
        context, plan = self._context, self._plan
        planned = resume_plan.plan_senders(plan)[context.node]
        sources = {}
        for node in (*planned.first, *planned.substitutes):
            served = served_by_rank[context.local_leader_by_node[node]]
            if served is not None:
                sources[node] = BlockSender.from_json(node, served)
        first = [str(sources[node]) for node in planned.first if node in sources]
        what = f"step {plan.step} ({format_bytes(plan.nbytes)})"
        logger.debug(f"node {context.node}: receiving {what} from {', '.join(first)}")
        transfer.receive(table, list(sources.values()), len(first))

    def _keep_received(self, tracked: Mapping[str, Any]) -> None:
        """Make a received image equal to the source's, and commit one that is in no slot."""
        if self._copy is None and self._context.is_local_leader and self._buffer is not None:
            values = self._source_values
            for name, extent in self._buffer.layout.extents.items():
                if name in values.names:
                    self._buffer.memory[extent.start : extent.stop] = values.tensor_bytes(name)
        if self._commits_received:
            self._context.run_on_all_ranks(self._commit_received)
            self._context.run_on_all_ranks(lambda: self._load_committed(tracked))

    def _commit_received(self) -> None:
        """Commit a state that was received into private memory."""
        context, manifest, buffer = self._context, self._local_manifest, self._buffer
        if self._copy is not None or self._slot is not None or manifest is None or buffer is None:
            return
        writer = CheckpointWriter(context.node_dir, context.settings.run_id, context.events.emit)
        writer.commit(manifest, [buffer.memory])
        self.on_disk = True

    def _load_and_join_tasks(self, tracked: Mapping[str, Any], manifest: Manifest) -> None:
        """Load from the buffer and join all threads; keep the most telling error for `_gather_failures`."""
        if self._buffer is not None and self._error is None:
            try:
                self._load_buffer(tracked, manifest, self._buffer)
            except ElasticResumeError as error:
                self._error = error
        for task in self._tasks:
            failure = task.join()
            if failure is None:
                continue
            if not isinstance(failure, ElasticResumeError):
                raise failure  # a peer is dead, so this generation ends
            if self._error is None or (is_local_copy_error(failure) and not is_local_copy_error(self._error)):
                self._error = failure

    def _load_buffer(self, tracked: Mapping[str, Any], manifest: Manifest, buffer: StreamingBuffer) -> None:
        values, extents = self._source_values, buffer.layout.extents
        # Modules copy tensors into their own memory; other objects keep the tensors that they are given.
        keepers = tuple(f"{name}/" for name, item in tracked.items() if not isinstance(item, nn.Module))
        names = [name for name in extents if name.startswith(keepers) and name not in values.names]
        is_large = sum(extents[name].stop - extents[name].start for name in names) > _MIN_PREFETCH_BYTES

        def buffer_of(name: str) -> StreamingBuffer:
            return values if name in values.names else buffer

        def count(tensor: Tensor) -> Tensor:
            self._loaded_bytes += tensor.nbytes
            return tensor

        prefetcher = Prefetcher(names if is_large else (), lambda name: buffer_of(name).get_tensor(name))
        try:
            load_objects.load_into(
                tracked,
                manifest.state,
                lambda name: count(buffer_of(name).get_tensor(name)),
                peek_tensor=lambda name: buffer_of(name).peek_tensor(name),
                make_tensor=lambda name: count(prefetcher.make_tensor(name)),
            )
        finally:
            prefetcher.close()

    def _load_committed(self, tracked: Mapping[str, Any]) -> None:
        """On a rank whose local leader received without a slot: load the checkpoint that it has committed."""
        if self._buffer is None and self.manifest is not None:
            path = self._context.checkpoint_path(SavedState(self._context.node, *self._plan.version, 0))
            manifest = reader.quick_check(path, self._context.settings.run_id)
            buffer = StreamingBuffer.from_complete(reader.map_image(path, manifest))
            self._load_buffer(tracked, self.manifest, buffer)

    # ---- the outcome -----------------------------------------------------------------------------------

    def _gather_failures(self) -> NodeFailures:
        """Return the copies that failed; raise errors that are no copy's fault on all ranks."""
        own = self._error if self._copy is not None and is_local_copy_error(self._error) else None
        failures = self._group_failures_by_node(self._context.collectives.gather(_encode_failure(own)))
        if not failures:
            self._context.run_on_all_ranks(lambda: raise_if_set(self._error))
        return failures

    def _group_failures_by_node(self, failure_by_rank: Sequence[list[str] | None]) -> NodeFailures:
        failures: dict[str, tuple[str, str]] = {}
        for node, failure in zip(self._context.node_by_rank, failure_by_rank, strict=True):
            if failure is None:
                continue
            kind, reason = failure
            # A rank that proved the copy invalid overrules a rank that could not read it.
            if node not in failures or (
                kind in PROVEN_INVALID_KINDS and failures[node][0] not in PROVEN_INVALID_KINDS
            ):
                failures[node] = (kind, reason)
        return failures

    def _require_buffer(self) -> StreamingBuffer:
        if self._buffer is None:
            raise UnreadableError("no copy was opened")
        return self._buffer


def _parse_values_layout(header: str, nbytes: int, max_bytes: int) -> Layout:
    """Parse the layout of the source's values, which are part of a state of ``max_bytes``."""
    if not 0 < nbytes <= max_bytes:
        raise CorruptError(f"the source rank announced {nbytes} of {max_bytes} bytes of the state.")
    return Layout.parse(header.encode("latin-1"), nbytes)


def _encode_failure(error: ElasticResumeError | None) -> list[str] | None:
    return [error.kind, str(error)] if isinstance(error, CheckpointError) else None
