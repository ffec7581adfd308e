"""One try to carry out a resume plan: every rank ends with the state loaded, or all hear whose copy failed.

The lead of each node brings the image into its node's memory, and all ranks of the node load from there while
it comes. In memory: it is there. On disk: it is read into a slot, past the page cache where that does not
hold it. Nowhere on this node: it is received into a slot. A node without a slot to spare maps its disk copy,
each rank for itself; where it has no copy either, its lead receives into memory of its own and commits
that, and the node's other ranks read what was committed.

Promise: no byte is loaded before its digest was checked (of a node's own memory there is none). A copy that
fails is told to all, in whatever moment, and nobody is left waiting; what has been loaded until then is
overwritten by the next plan, since nothing trains before one has gone through. A slot counts when its
image is whole and all ranks have loaded.

What ranks need not agree on takes the source's values on all of them, whatever their own copies hold.

BatchNorm's buffers, schedulers, anything tracked that is neither parameter nor optimizer state: a thread of
every rank takes part in their broadcast, in an order that all know, while the ranks load. They go into
memory of their own, never into the image, which stays what its node had saved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.layout import MAX_FILE_BYTES, MAX_TENSOR_DIMENSIONS, Layout, TensorSpec
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import allocate_memory
from elastic_resume.checkpoint.writer import CheckpointWriter
from elastic_resume.errors import (
    CheckpointError,
    CorruptError,
    ElasticResumeError,
    MachineError,
    TornError,
    UnreadableError,
)
from elastic_resume.policy import resume_plan
from elastic_resume.policy.resume_plan import MEMORY, Broadcast, ResumePlan, SavedState
from elastic_resume.restore import transfer
from elastic_resume.restore.collectives import Channel
from elastic_resume.restore.rank_context import RankContext
from elastic_resume.restore.transfer import (
    BackgroundTask,
    LocalWatermark,
    PeerFailedError,
    Prefetcher,
    StreamingBuffer,
    is_local_copy_error,
)
from elastic_resume.snapshot.slots import Slot
from elastic_resume.state import load_state
from elastic_resume.state.tensor_buffer import DTYPE_BY_NAME, view_bytes

MAX_PACKED_TENSOR_BYTES = (
    1 << 20
)  # smaller ones travel together; larger ones alone, and become the state themselves
_ALIGNMENT = 16
_STATUS_OK, _STATUS_FAILED = 1, 2


def describe_tensors(layout: Layout, names: Sequence[str]) -> list[list[Any]]:
    """Say what the tensors ``names`` are, so that ranks without the image can make room for them.

    Raises:
        CorruptError: the image has no such tensor.

    """
    try:
        return [[name, layout.extents[name].dtype, list(layout.extents[name].shape)] for name in names]
    except KeyError as error:
        raise CorruptError(f"the manifest names a tensor that is not there: {error}.") from error


def parse_tensor_specs(described: Any, limit_bytes: int) -> list[TensorSpec]:
    """Read what `describe` gave on another rank. Raises CorruptError."""
    try:
        specs = [
            TensorSpec(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in described
        ]
    except (TypeError, ValueError) as error:
        raise CorruptError(f"what the source's values are is not said rightly ({error}).") from error
    possible = all(
        spec.dtype in DTYPE_BY_NAME
        and len(spec.shape) <= MAX_TENSOR_DIMENSIONS
        and all(0 <= size <= MAX_FILE_BYTES for size in spec.shape)
        for spec in specs
    )
    if not possible or sum(spec.nbytes for spec in specs) > limit_bytes:
        raise CorruptError("the source's values are of impossible dtypes or sizes.")
    return specs


class SourceValues:
    """The source's values of some tensors, as they come."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._tensors: dict[str, Tensor] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def __bool__(self) -> bool:
        return bool(self._specs)

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def get_tensor(self, name: str) -> Tensor:
        """Give a tensor when it has come. Raises what went wrong."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._tensors or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._tensors[name]

    def make_tensor(self, name: str) -> Tensor:
        """Give a tensor for keeps: a large one lies in memory of its own already."""
        tensor = self.get_tensor(name)
        return tensor if self._specs[name].nbytes > MAX_PACKED_TENSOR_BYTES else tensor.clone()

    def peek_tensor(self, name: str) -> Tensor:
        """Give an empty tensor of its shape and dtype."""
        spec = self._specs[name]
        return torch.empty(spec.shape, dtype=DTYPE_BY_NAME[spec.dtype])

    def broadcast(self, channel: Channel, buffer: StreamingBuffer | None, source_rank: int) -> None:
        """Send them (where ``image`` is given) or receive them, all; to be called on every rank."""
        try:
            for batch in _split_into_batches(list(self._specs.values())):
                self._broadcast_batch(channel, batch, buffer, source_rank)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            raise

    def _broadcast_batch(
        self, channel: Channel, batch: list[TensorSpec], buffer: StreamingBuffer | None, source_rank: int
    ) -> None:
        packed = torch.empty(sum(_padded_bytes(spec) for spec in batch), dtype=torch.uint8)
        status = torch.tensor([_STATUS_OK], dtype=torch.uint8)
        problem: CheckpointError | None = None
        if buffer is not None:
            try:
                _pack(packed, batch, buffer)
            except CheckpointError as error:
                status[0], problem = _STATUS_FAILED, error
        channel.broadcast(status, source_rank)
        if int(status) != _STATUS_OK:
            raise problem or PeerFailedError(f"rank {source_rank} could not send the values that all take")
        if packed.numel():
            channel.broadcast(packed, source_rank)
        with self._changed:
            self._tensors.update(_unpack(packed, batch))
            self._changed.notify_all()


def _pack(packed: Tensor, batch: Sequence[TensorSpec], buffer: StreamingBuffer) -> None:
    memory, at = view_bytes(packed), 0
    for spec in batch:
        memory[at : at + spec.nbytes] = buffer.tensor_bytes(spec.name)
        at += _padded_bytes(spec)


def _unpack(packed: Tensor, batch: Sequence[TensorSpec]) -> dict[str, Tensor]:
    tensors, at = {}, 0
    for spec in batch:
        flat = packed[at : at + spec.nbytes].view(DTYPE_BY_NAME[spec.dtype])
        tensors[spec.name] = flat.view(spec.shape)
        at += _padded_bytes(spec)
    return tensors


def _padded_bytes(spec: TensorSpec) -> int:
    return -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT


def _split_into_batches(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    batches: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if spec.nbytes > MAX_PACKED_TENSOR_BYTES:
            batches.append([spec])
            room = 0
            continue
        if not batches or _padded_bytes(spec) > room:
            batches.append([])
            room = MAX_PACKED_TENSOR_BYTES
        batches[-1].append(spec)
        room -= _padded_bytes(spec)
    return batches


NodeFailures = Mapping[str, tuple[str, str]]  # node -> kind of CheckpointError and reason
_MIN_PREFETCH_BYTES = 8 << 20
PROVEN_INVALID_KINDS = {TornError.kind, CorruptError.kind}


class RestoreAttempt:
    """One try, on one rank. All ranks call `open`, then `load` or `close`, then `keep`, together."""

    def __init__(self, context: RankContext, plan: ResumePlan) -> None:
        self.manifest: Manifest | None = None  # the source's, on every rank, once `load` has begun
        self.on_disk = False  # whether this node's own disk holds the copy, verified
        self._context = context
        self._plan = plan
        self._slot_client = context.slot_client
        self._copy = plan.saved_state_for(context.node)
        self._local_manifest: Manifest | None = (
            None  # of the copy on this node, or of the one that is received
        )
        self._buffer: StreamingBuffer | None = None
        self._slot: Slot | None = None  # of this node's memory, from which its ranks load
        self._fills_slot = False  # whether that slot does not count yet
        self._error: ElasticResumeError | None = None  # of this rank, not told yet
        self._loads_after_commit = False  # whether ranks wait for their lead's commit, on any node
        self._non_replicated: list[list[Any]] = []  # what all take from the source, as the source says it
        self._source_values = SourceValues(())
        self._tasks: list[BackgroundTask] = []

    @property
    def tier(self) -> str:
        """Where this node's copy lies; "" where it has none."""
        return self._copy.tier if self._copy is not None else ""

    # ---- opening ---------------------------------------------------------------------------------------

    def open(self) -> NodeFailures:
        """Begin to bring this node's copy into its memory; give the copies that failed already, of all."""
        problem: CheckpointError | None = None
        header = None
        if self._copy is not None and self._context.is_local_leader:
            try:
                header = self._open_copy(self._copy)
            except CheckpointError as error:
                problem = error
            except (OSError, MemoryError) as error:
                where = self._context.checkpoint_path(self._copy)
                problem = UnreadableError(f"{where}: cannot be read now ({error!r})")
        told = self._context.collectives.gather([_encode_failure(problem), header, self._slot_id()])
        failures = self._group_failures_by_node([one[0] for one in told])
        if failures:
            return failures
        expected = told[self._plan.source_rank][1]
        unlike = f"its tensors are laid out unlike those of {self._plan.source_node}"
        failures = {
            self._context.node_by_rank[rank]: ("unlike", unlike)
            for rank, one in enumerate(told)
            if one[1] not in {None, expected}
        }
        if not failures and self._copy is not None:
            self._attach_to_local_leader(told[self._context.local_leader_by_node[self._context.node]][2])
        return failures

    def _open_copy(self, copy: SavedState) -> str:
        """Begin to read this node's copy; give the digest of its header."""
        if copy.tier == MEMORY:
            self._open_snapshot(copy)
        else:
            self._open_checkpoint(copy)
        if self._plan.nbytes != copy.nbytes or len(self._require_buffer().memory) != copy.nbytes:
            raise UnreadableError(f"{copy.nbytes} bytes were expected, and found others")
        layout = self._require_buffer().layout
        if self._local_manifest is not None:
            self._non_replicated = describe_tensors(layout, self._local_manifest.follows_rank0)
        return xxhash.xxh3_128_hexdigest(layout.header)

    def _open_snapshot(self, copy: SavedState) -> None:
        held = self._slot_client.find_newest() if self._slot_client is not None else None
        if held is None or (*held.version, held.manifest.position.epoch) != (*copy.version, copy.epoch):
            raise UnreadableError("the snapshot in this node's memory is there no more")
        self._local_manifest, self._slot = held.manifest, held.slot
        self._buffer = StreamingBuffer.from_complete(held.image)

    def _open_checkpoint(self, copy: SavedState) -> None:
        path = self._context.checkpoint_path(copy)
        manifest = reader.quick_check(path, self._context.settings.run_id)
        self.on_disk = copy.owner_node == self._context.node
        self._local_manifest = manifest
        image = self._reserve_slot(self._local_manifest) if self._context.is_local_leader else None
        if image is not None:
            into, arrived = image.memory, image.advance
            task = BackgroundTask("fill", lambda: reader.read_image(path, manifest, into, arrived), image)
        else:
            # Its bytes are sent and copied on at once, and dropped: no memory is touched for them.
            mapping = reader.map_unverified(path, manifest)
            image = StreamingBuffer(memoryview(mapping), LocalWatermark())
            arrived = image.advance
            task = BackgroundTask(
                "fill", lambda: reader.verify_mapping(path, manifest, mapping, arrived), image
            )
        self._buffer = image
        self._tasks.append(task)

    def _reserve_slot(self, manifest: Manifest) -> StreamingBuffer | None:
        """Take a slot for an image that comes; None where the node has none to spare."""
        slot = (
            self._slot_client.acquire_slot(manifest.file_bytes, manifest)
            if self._slot_client is not None
            else None
        )
        if slot is None or self._slot_client is None:
            return None
        self._slot_client.begin_fill(slot)
        self._slot, self._fills_slot = slot, True
        # Ahead of what arrives: a page that the kernel maps when it is written first costs 8 us, and 1 us so.
        memory = self._slot_client
        self._tasks.append(BackgroundTask("populate", lambda: memory.populate(slot)))
        return StreamingBuffer(slot.memory[: manifest.file_bytes], slot)

    def _slot_id(self) -> list[int] | None:
        return [self._slot.index, self._slot.serial] if self._slot is not None else None

    def _attach_to_local_leader(self, slot_id: list[int] | None) -> None:
        """On a rank that does not lead its node: look at what the lead fills, or map the copy as well."""
        if self._context.is_local_leader:
            return
        try:
            if slot_id is not None:
                self._buffer = self._map_leader_slot(*slot_id)
            elif self._copy is not None:
                self._open_checkpoint(self._copy)
        except ElasticResumeError as error:
            self._error = error  # told with the outcome: the others are on their way to load

    def _map_leader_slot(self, index: int, serial: int) -> StreamingBuffer:
        slot = self._slot_client.map_slot(index, serial) if self._slot_client is not None else None
        if slot is None:
            raise MachineError(
                f"rank {self._context.collectives.rank} cannot map the snapshots of its node {self._context.node}, "
                "though the rank that leads it can: see whether it may open more files (ulimit -n)."
            )
        whole = self._copy is not None and self._copy.tier == MEMORY
        nbytes = self._plan.nbytes
        return StreamingBuffer(slot.memory[:nbytes], LocalWatermark(nbytes) if whole else slot)

    # ---- loading ---------------------------------------------------------------------------------------

    def load(self, tracked: Mapping[str, Any]) -> NodeFailures:
        """Load the state into ``tracked``, while it comes; give the copies that failed.

        Raises:
            MismatchError: the objects do not fit; nothing was loaded.
            ElasticResumeError: a node could not take what was sent to it.

        """
        place, plan = self._context, self._plan
        told = place.collectives.broadcast_json(
            place.run_on_all_ranks(self._describe_source), plan.source_rank
        )
        self.manifest = Manifest.parse(told[0].encode())
        follows = parse_tensor_specs(told[1], plan.nbytes)
        # Where all load the same copy they have the same values.
        self._source_values = SourceValues(follows if len(plan.holders) > 1 else ())
        for stream in resume_plan.plan_broadcasts(plan):
            self._start_stream(stream)
        if plan.lacking:
            self._attach_receivers()
        everybody = place.collectives.all_ranks_channel()
        if everybody is not None and self._source_values:
            image = self._buffer if place.collectives.rank == plan.source_rank else None
            sent = BackgroundTask(
                "values", lambda: self._source_values.broadcast(everybody, image, plan.source_rank)
            )
            self._tasks.append(sent)
        self._load_and_join_tasks(tracked, self.manifest)
        failures = self._gather_failures()
        if not failures and self._loads_after_commit:
            place.run_on_all_ranks(lambda: self._load_committed(tracked))
        return failures

    def publish_slot(self) -> None:
        """All ranks have loaded: the slot that was filled counts as this node's snapshot."""
        if (
            self._fills_slot
            and self._slot is not None
            and self._slot_client is not None
            and self._local_manifest is not None
        ):
            self._slot_client.finish_fill(self._slot, self._local_manifest, on_disk=self.on_disk)

    def discard_snapshot(self) -> None:
        """Let the snapshot in this node's memory that turned out bad count no more."""
        if self._slot is not None and self._slot_client is not None:
            self._slot_client.discard(self._slot.index)

    def close(self) -> None:
        """Give up: another plan will be made."""
        if self._buffer is not None:
            self._buffer.cancel()
        for task in self._tasks:
            task.join()

    def _describe_source(self) -> list[Any] | None:
        """On the source: its manifest, without what is of its blocks, and what all take from it."""
        if self._context.collectives.rank != self._plan.source_rank or self._local_manifest is None:
            return None
        return [_strip_digests(self._local_manifest).to_bytes().decode(), self._non_replicated]

    def _start_stream(self, stream: Broadcast) -> None:
        """Send or receive in a thread, where this rank has to. All ranks make the channel."""
        rank = self._context.local_leader_by_node[stream.source]
        ranks = [rank, *(self._context.local_leader_by_node[node] for node in stream.receivers)]
        channel = self._context.collectives.create_channel(ranks)
        if channel is None:
            return
        if self._context.collectives.rank != rank:
            self._start_receiving(channel, rank)
        elif self._local_manifest is not None:
            image, own = self._require_buffer(), self._local_manifest
            channel.broadcast_json(_strip_digests(own).to_bytes().decode(), rank)
            task = BackgroundTask(
                "send", lambda: transfer.send(channel, image, own.blocks, own.block_bytes, rank)
            )
            self._tasks.append(task)

    def _start_receiving(self, channel: Channel, source_rank: int) -> None:
        manifest = Manifest.parse(channel.broadcast_json(None, source_rank).encode())
        self._local_manifest = own = replace(manifest, node=self._context.node, file_bytes=self._plan.nbytes)
        slot = self._reserve_slot(own)
        self._buffer = image = slot or StreamingBuffer(allocate_memory(own.file_bytes), LocalWatermark())
        task = BackgroundTask(
            "receive", lambda: transfer.receive(channel, image, own.block_bytes, source_rank), image
        )
        self._tasks.append(task)
        if slot is None:
            self._tasks.append(BackgroundTask("commit", lambda: self._commit_received(own, image)))

    def _commit_received(self, manifest: Manifest, buffer: StreamingBuffer) -> None:
        """Commit what is received without a slot, while it comes. A disk that refuses does not stop that."""

        def pieces() -> Iterator[memoryview]:
            for start in range(0, manifest.file_bytes, manifest.block_bytes):
                stop = min(start + manifest.block_bytes, manifest.file_bytes)
                buffer.wait_for_bytes(stop)
                yield buffer.memory[start:stop]

        place = self._context
        CheckpointWriter(place.node_dir, place.settings.run_id, place.events.emit).commit(manifest, pieces())
        self.on_disk = True

    def _attach_receivers(self) -> None:
        """Tell the other ranks of each receiving node where their lead receives."""
        place = self._context
        names = place.collectives.gather(self._slot_id())
        for node in self._plan.lacking:
            lead = place.local_leader_by_node[node]
            self._loads_after_commit |= names[lead] is None and place.node_by_rank.count(node) > 1
            if node == place.node and names[lead] is not None:
                self._attach_to_local_leader(names[lead])

    def _load_and_join_tasks(self, tracked: Mapping[str, Any], manifest: Manifest) -> None:
        """Load what comes, and wait for all threads; what went wrong is kept for `_conclude`."""
        image = self._buffer
        if image is not None and self._error is None:
            try:
                self._load_buffer(tracked, manifest, image)
            except ElasticResumeError as error:
                self._error = error
        for task in self._tasks:
            met = task.join()
            if met is None:
                continue
            if not isinstance(met, ElasticResumeError):
                raise met  # a peer is gone, and with it this world
            if self._error is None or (is_local_copy_error(met) and not is_local_copy_error(self._error)):
                self._error = met

    def _load_buffer(self, tracked: Mapping[str, Any], manifest: Manifest, buffer: StreamingBuffer) -> None:
        values, extents = self._source_values, buffer.layout.extents
        kept = tuple(f"{name}/" for name, item in tracked.items() if not isinstance(item, nn.Module))
        names = [name for name in extents if name.startswith(kept) and name not in values]
        # For small ones the threads would cost more than they spare.
        large = sum(extents[name].stop - extents[name].start for name in names) > _MIN_PREFETCH_BYTES
        copies = Prefetcher(names if large else (), buffer.get_tensor)
        try:
            load_state.load_into(
                tracked,
                manifest.state,
                lambda name: (values if name in values else buffer).get_tensor(name),
                peek_tensor=lambda name: (values if name in values else buffer).peek_tensor(name),
                make_tensor=lambda name: (values.make_tensor if name in values else copies.make_tensor)(name),
            )
        finally:
            copies.close()

    def _load_committed(self, tracked: Mapping[str, Any]) -> None:
        """On a rank whose lead received without a slot: load what it has committed."""
        if self._buffer is None and self.manifest is not None:
            copy = SavedState(self._context.node, *self._plan.version, 0)
            path = self._context.checkpoint_path(copy)
            own = reader.quick_check(path, self._context.settings.run_id)
            self._load_buffer(
                tracked, self.manifest, StreamingBuffer.from_complete(reader.map_image(path, own))
            )

    # ---- the outcome -----------------------------------------------------------------------------------

    def _gather_failures(self) -> NodeFailures:
        """Give the copies that failed; raise on all ranks what is nobody's copy's fault."""
        own = self._error if self._copy is not None and is_local_copy_error(self._error) else None
        failures = self._group_failures_by_node(self._context.collectives.gather(_encode_failure(own)))
        if not failures:
            self._context.run_on_all_ranks(self._raise_error)
        return failures

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _group_failures_by_node(self, failure_by_rank: list[list[str] | None]) -> NodeFailures:
        failures: dict[str, tuple[str, str]] = {}
        for rank, found in enumerate(failure_by_rank):
            node = self._context.node_by_rank[rank]
            if found is None:
                continue
            # A rank that proved the copy bad knows more than one that could not read it.
            if node not in failures or (
                found[0] in PROVEN_INVALID_KINDS and failures[node][0] not in PROVEN_INVALID_KINDS
            ):
                failures[node] = (found[0], found[1])
        return failures

    def _require_buffer(self) -> StreamingBuffer:
        if self._buffer is None:
            raise UnreadableError("no image was opened")
        return self._buffer


def _encode_failure(error: ElasticResumeError | None) -> list[str] | None:
    return [error.kind, str(error)] if isinstance(error, CheckpointError) else None


def _strip_digests(manifest: Manifest) -> Manifest:
    """A manifest for another rank: the digests of blocks travel with them, and the plan knows the size."""
    return replace(manifest, blocks=(), file_bytes=0)
