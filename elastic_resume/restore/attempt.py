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
from elastic_resume.checkpoint.layout import MAX_DIMENSIONS, MAX_FILE_BYTES, Layout, TensorSpec
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import fresh_memory
from elastic_resume.checkpoint.writer import Shelf
from elastic_resume.errors import (
    CheckpointError,
    CorruptError,
    ElasticResumeError,
    MachineError,
    TornError,
    UnreadableError,
)
from elastic_resume.policy import resume_plan
from elastic_resume.policy.resume_plan import MEMORY, Copy, ResumePlan, Stream
from elastic_resume.restore import transfer
from elastic_resume.restore.collectives import Channel
from elastic_resume.restore.rank_context import Place
from elastic_resume.restore.transfer import Arriving, Copies, PeerFailedError, Private, Task, is_own
from elastic_resume.snapshot.slots import Slot
from elastic_resume.state import load_state
from elastic_resume.state.tensor_buffer import DTYPES, memory_of

PACKED_BYTES = 1 << 20  # smaller ones travel together; larger ones alone, and become the state themselves
_ALIGNMENT = 16
_GOES_ON, _FAILED = 1, 2


def describe(layout: Layout, names: Sequence[str]) -> list[list[Any]]:
    """Say what the tensors ``names`` are, so that ranks without the image can make room for them.

    Raises:
        CorruptError: the image has no such tensor.

    """
    try:
        return [[name, layout.extents[name].dtype, list(layout.extents[name].shape)] for name in names]
    except KeyError as error:
        raise CorruptError(f"the manifest names a tensor that is not there: {error}.") from error


def parse(told: Any, limit_bytes: int) -> list[TensorSpec]:
    """Read what `describe` gave on another rank. Raises CorruptError."""
    try:
        specs = [TensorSpec(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in told]
    except (TypeError, ValueError) as error:
        raise CorruptError(f"what the source's values are is not said rightly ({error}).") from error
    possible = all(
        spec.dtype in DTYPES
        and len(spec.shape) <= MAX_DIMENSIONS
        and all(0 <= size <= MAX_FILE_BYTES for size in spec.shape)
        for spec in specs
    )
    if not possible or sum(spec.nbytes for spec in specs) > limit_bytes:
        raise CorruptError("the source's values are of impossible dtypes or sizes.")
    return specs


class Overlay:
    """The source's values of some tensors, as they come."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._tensors: dict[str, Tensor] = {}
        self._error: BaseException | None = None
        self._news = threading.Condition()

    def __bool__(self) -> bool:
        return bool(self._specs)

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def tensor(self, name: str) -> Tensor:
        """Give a tensor when it has come. Raises what went wrong."""
        with self._news:
            self._news.wait_for(lambda: name in self._tensors or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._tensors[name]

    def own(self, name: str) -> Tensor:
        """Give a tensor for keeps: a large one lies in memory of its own already."""
        tensor = self.tensor(name)
        return tensor if self._specs[name].nbytes > PACKED_BYTES else tensor.clone()

    def look(self, name: str) -> Tensor:
        """Give an empty tensor of its shape and dtype."""
        spec = self._specs[name]
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype])

    def exchange(self, channel: Channel, image: Arriving | None, source_rank: int) -> None:
        """Send them (where ``image`` is given) or receive them, all; to be called on every rank."""
        try:
            for batch in _batches(list(self._specs.values())):
                self._exchange(channel, batch, image, source_rank)
        except BaseException as error:
            with self._news:
                self._error = error
                self._news.notify_all()
            raise

    def _exchange(
        self, channel: Channel, batch: list[TensorSpec], image: Arriving | None, source_rank: int
    ) -> None:
        packed = torch.empty(sum(_padded(spec) for spec in batch), dtype=torch.uint8)
        status = torch.tensor([_GOES_ON], dtype=torch.uint8)
        problem: CheckpointError | None = None
        if image is not None:
            try:
                _pack(packed, batch, image)
            except CheckpointError as error:
                status[0], problem = _FAILED, error
        channel.broadcast(status, source_rank)
        if int(status) != _GOES_ON:
            raise problem or PeerFailedError(f"rank {source_rank} could not send the values that all take")
        if packed.numel():
            channel.broadcast(packed, source_rank)
        with self._news:
            self._tensors.update(_unpack(packed, batch))
            self._news.notify_all()


def _pack(packed: Tensor, batch: Sequence[TensorSpec], image: Arriving) -> None:
    memory, at = memory_of(packed), 0
    for spec in batch:
        memory[at : at + spec.nbytes] = image.bytes_of(spec.name)
        at += _padded(spec)


def _unpack(packed: Tensor, batch: Sequence[TensorSpec]) -> dict[str, Tensor]:
    tensors, at = {}, 0
    for spec in batch:
        flat = packed[at : at + spec.nbytes].view(DTYPES[spec.dtype])
        tensors[spec.name] = flat.view(spec.shape)
        at += _padded(spec)
    return tensors


def _padded(spec: TensorSpec) -> int:
    return -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT


def _batches(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    batches: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if spec.nbytes > PACKED_BYTES:
            batches.append([spec])
            room = 0
            continue
        if not batches or _padded(spec) > room:
            batches.append([])
            room = PACKED_BYTES
        batches[-1].append(spec)
        room -= _padded(spec)
    return batches


Failures = Mapping[str, tuple[str, str]]  # node -> kind of CheckpointError and reason
_WORTH_THREADS_BYTES = 8 << 20
PROVEN_BAD = {TornError.kind, CorruptError.kind}


class Attempt:
    """One try, on one rank. All ranks call `open`, then `load` or `close`, then `keep`, together."""

    def __init__(self, place: Place, plan: ResumePlan) -> None:
        self.manifest: Manifest | None = None  # the source's, on every rank, once `load` has begun
        self.on_disk = False  # whether this node's own disk holds the copy, verified
        self._place = place
        self._plan = plan
        self._memory = place.memory
        self._copy = plan.copy_of(place.node)
        self._own: Manifest | None = None  # of the copy on this node, or of the one that is received
        self._image: Arriving | None = None
        self._slot: Slot | None = None  # of this node's memory, from which its ranks load
        self._fills = False  # whether that slot does not count yet
        self._problem: ElasticResumeError | None = None  # of this rank, not told yet
        self._late = False  # whether ranks wait for their lead's commit, on any node
        self._follows: list[list[Any]] = []  # what all take from the source, as the source says it
        self._values = Overlay(())
        self._tasks: list[Task] = []

    @property
    def tier(self) -> str:
        """Where this node's copy lies; "" where it has none."""
        return self._copy.tier if self._copy is not None else ""

    # ---- opening ---------------------------------------------------------------------------------------

    def open(self) -> Failures:
        """Begin to bring this node's copy into its memory; give the copies that failed already, of all."""
        problem: CheckpointError | None = None
        header = None
        if self._copy is not None and self._place.leads:
            try:
                header = self._open_copy(self._copy)
            except CheckpointError as error:
                problem = error
            except (OSError, MemoryError) as error:
                where = self._place.path_of(self._copy)
                problem = UnreadableError(f"{where}: cannot be read now ({error!r})")
        told = self._place.world.gather([_told(problem), header, self._slot_name()])
        failures = self._failures([one[0] for one in told])
        if failures:
            return failures
        expected = told[self._plan.source_rank][1]
        unlike = f"its tensors are laid out unlike those of {self._plan.source_node}"
        failures = {
            self._place.node_of[rank]: ("unlike", unlike)
            for rank, one in enumerate(told)
            if one[1] not in {None, expected}
        }
        if not failures and self._copy is not None:
            self._join_lead(told[self._place.lead_of[self._place.node]][2])
        return failures

    def _open_copy(self, copy: Copy) -> str:
        """Begin to read this node's copy; give the digest of its header."""
        if copy.tier == MEMORY:
            self._open_snapshot(copy)
        else:
            self._open_checkpoint(copy)
        if self._plan.nbytes != copy.nbytes or len(self._require_image().memory) != copy.nbytes:
            raise UnreadableError(f"{copy.nbytes} bytes were expected, and found others")
        layout = self._require_image().layout
        if self._own is not None:
            self._follows = describe(layout, self._own.follows_rank0)
        return xxhash.xxh3_128_hexdigest(layout.header)

    def _open_snapshot(self, copy: Copy) -> None:
        held = self._memory.newest() if self._memory is not None else None
        if held is None or (*held.order, held.manifest.position.epoch) != (*copy.order, copy.epoch):
            raise UnreadableError("the snapshot in this node's memory is there no more")
        self._own, self._slot = held.manifest, held.slot
        self._image = Arriving.whole(held.image)

    def _open_checkpoint(self, copy: Copy) -> None:
        path = self._place.path_of(copy)
        manifest = reader.quick_check(path, self._place.settings.run_id)
        self.on_disk = copy.home == self._place.node
        self._own = manifest
        image = self._take_slot(self._own) if self._place.leads else None
        if image is not None:
            into, arrived = image.memory, image.advance
            task = Task("fill", lambda: reader.read_image(path, manifest, into, arrived), image)
        else:
            # Its bytes are sent and copied on at once, and dropped: no memory is touched for them.
            mapping = reader.map_unverified(path, manifest)
            image = Arriving(memoryview(mapping), Private())
            arrived = image.advance
            task = Task("fill", lambda: reader.verify_mapping(path, manifest, mapping, arrived), image)
        self._image = image
        self._tasks.append(task)

    def _take_slot(self, manifest: Manifest) -> Arriving | None:
        """Take a slot for an image that comes; None where the node has none to spare."""
        slot = self._memory.room(manifest.file_bytes, manifest) if self._memory is not None else None
        if slot is None or self._memory is None:
            return None
        self._memory.begin_fill(slot)
        self._slot, self._fills = slot, True
        # Ahead of what arrives: a page that the kernel maps when it is written first costs 8 us, and 1 us so.
        memory = self._memory
        self._tasks.append(Task("populate", lambda: memory.populate(slot)))
        return Arriving(slot.memory[: manifest.file_bytes], slot)

    def _slot_name(self) -> list[int] | None:
        return [self._slot.index, self._slot.serial] if self._slot is not None else None

    def _join_lead(self, name: list[int] | None) -> None:
        """On a rank that does not lead its node: look at what the lead fills, or map the copy as well."""
        if self._place.leads:
            return
        try:
            if name is not None:
                self._image = self._share(*name)
            elif self._copy is not None:
                self._open_checkpoint(self._copy)
        except ElasticResumeError as error:
            self._problem = error  # told with the outcome: the others are on their way to load

    def _share(self, index: int, serial: int) -> Arriving:
        slot = self._memory.slot(index, serial) if self._memory is not None else None
        if slot is None:
            raise MachineError(
                f"rank {self._place.world.rank} cannot map the snapshots of its node {self._place.node}, "
                "though the rank that leads it can: see whether it may open more files (ulimit -n)."
            )
        whole = self._copy is not None and self._copy.tier == MEMORY
        nbytes = self._plan.nbytes
        return Arriving(slot.memory[:nbytes], Private(nbytes) if whole else slot)

    # ---- loading ---------------------------------------------------------------------------------------

    def load(self, tracked: Mapping[str, Any]) -> Failures:
        """Load the state into ``tracked``, while it comes; give the copies that failed.

        Raises:
            MismatchError: the objects do not fit; nothing was loaded.
            ElasticResumeError: a node could not take what was sent to it.

        """
        place, plan = self._place, self._plan
        told = place.world.tell(place.together(self._describe), plan.source_rank)
        self.manifest = Manifest.parse(told[0].encode())
        follows = parse(told[1], plan.nbytes)
        # Where all load the same copy they have the same values.
        self._values = Overlay(follows if len(plan.holders) > 1 else ())
        for stream in resume_plan.streams(plan):
            self._begin_stream(stream)
        if plan.lacking:
            self._agree_on_slots()
        everybody = place.world.everybody()
        if everybody is not None and self._values:
            image = self._image if place.world.rank == plan.source_rank else None
            sent = Task("values", lambda: self._values.exchange(everybody, image, plan.source_rank))
            self._tasks.append(sent)
        self._load_here(tracked, self.manifest)
        failures = self._conclude()
        if not failures and self._late:
            place.together(lambda: self._load_late(tracked))
        return failures

    def keep(self) -> None:
        """All ranks have loaded: the slot that was filled counts as this node's snapshot."""
        if self._fills and self._slot is not None and self._memory is not None and self._own is not None:
            self._memory.finish_fill(self._slot, self._own, on_disk=self.on_disk)

    def discard(self) -> None:
        """Let the snapshot in this node's memory that turned out bad count no more."""
        if self._slot is not None and self._memory is not None:
            self._memory.discard(self._slot.index)

    def close(self) -> None:
        """Give up: another plan will be made."""
        if self._image is not None:
            self._image.stop()
        for task in self._tasks:
            task.join()

    def _describe(self) -> list[Any] | None:
        """On the source: its manifest, without what is of its blocks, and what all take from it."""
        if self._place.world.rank != self._plan.source_rank or self._own is None:
            return None
        return [_bare(self._own).to_bytes().decode(), self._follows]

    def _begin_stream(self, stream: Stream) -> None:
        """Send or receive in a thread, where this rank has to. All ranks make the channel."""
        rank = self._place.lead_of[stream.source]
        ranks = [rank, *(self._place.lead_of[node] for node in stream.receivers)]
        channel = self._place.world.subgroup(ranks)
        if channel is None:
            return
        if self._place.world.rank != rank:
            self._begin_to_receive(channel, rank)
        elif self._own is not None:
            image, own = self._require_image(), self._own
            channel.tell(_bare(own).to_bytes().decode(), rank)
            task = Task("send", lambda: transfer.send(channel, image, own.blocks, own.block_bytes, rank))
            self._tasks.append(task)

    def _begin_to_receive(self, channel: Channel, rank: int) -> None:
        manifest = Manifest.parse(channel.tell(None, rank).encode())
        self._own = own = replace(manifest, node=self._place.node, file_bytes=self._plan.nbytes)
        slot = self._take_slot(own)
        self._image = image = slot or Arriving(fresh_memory(own.file_bytes), Private())
        task = Task("receive", lambda: transfer.receive(channel, image, own.block_bytes, rank), image)
        self._tasks.append(task)
        if slot is None:
            self._tasks.append(Task("commit", lambda: self._commit(own, image)))

    def _commit(self, manifest: Manifest, image: Arriving) -> None:
        """Commit what is received without a slot, while it comes. A disk that refuses does not stop that."""

        def pieces() -> Iterator[memoryview]:
            for start in range(0, manifest.file_bytes, manifest.block_bytes):
                stop = min(start + manifest.block_bytes, manifest.file_bytes)
                image.wait(stop)
                yield image.memory[start:stop]

        place = self._place
        Shelf(place.node_dir, place.settings.run_id, place.events.write).put(manifest, pieces())
        self.on_disk = True

    def _agree_on_slots(self) -> None:
        """Tell the other ranks of each receiving node where their lead receives."""
        place = self._place
        names = place.world.gather(self._slot_name())
        for node in self._plan.lacking:
            lead = place.lead_of[node]
            self._late |= names[lead] is None and place.node_of.count(node) > 1
            if node == place.node and names[lead] is not None:
                self._join_lead(names[lead])

    def _load_here(self, tracked: Mapping[str, Any], manifest: Manifest) -> None:
        """Load what comes, and wait for all threads; what went wrong is kept for `_conclude`."""
        image = self._image
        if image is not None and self._problem is None:
            try:
                self._load_image(tracked, manifest, image)
            except ElasticResumeError as error:
                self._problem = error
        for task in self._tasks:
            met = task.join()
            if met is None:
                continue
            if not isinstance(met, ElasticResumeError):
                raise met  # a peer is gone, and with it this world
            if self._problem is None or (is_own(met) and not is_own(self._problem)):
                self._problem = met

    def _load_image(self, tracked: Mapping[str, Any], manifest: Manifest, image: Arriving) -> None:
        values, extents = self._values, image.layout.extents
        kept = tuple(f"{name}/" for name, item in tracked.items() if not isinstance(item, nn.Module))
        names = [name for name in extents if name.startswith(kept) and name not in values]
        # For small ones the threads would cost more than they spare.
        large = sum(extents[name].stop - extents[name].start for name in names) > _WORTH_THREADS_BYTES
        copies = Copies(names if large else (), image.tensor)
        try:
            load_state.load(
                tracked,
                manifest.state,
                lambda name: (values if name in values else image).tensor(name),
                look=lambda name: (values if name in values else image).look(name),
                own=lambda name: (values.own if name in values else copies.take)(name),
            )
        finally:
            copies.close()

    def _load_late(self, tracked: Mapping[str, Any]) -> None:
        """On a rank whose lead received without a slot: load what it has committed."""
        if self._image is None and self.manifest is not None:
            copy = Copy(self._place.node, *self._plan.order, 0)
            path = self._place.path_of(copy)
            own = reader.quick_check(path, self._place.settings.run_id)
            self._load_image(tracked, self.manifest, Arriving.whole(reader.map_image(path, own)))

    # ---- the outcome -----------------------------------------------------------------------------------

    def _conclude(self) -> Failures:
        """Give the copies that failed; raise on all ranks what is nobody's copy's fault."""
        own = self._problem if self._copy is not None and is_own(self._problem) else None
        failures = self._failures(self._place.world.gather(_told(own)))
        if not failures:
            self._place.together(self._raise_problem)
        return failures

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _failures(self, told: list[list[str] | None]) -> Failures:
        failures: dict[str, tuple[str, str]] = {}
        for rank, found in enumerate(told):
            node = self._place.node_of[rank]
            if found is None:
                continue
            # A rank that proved the copy bad knows more than one that could not read it.
            if node not in failures or (found[0] in PROVEN_BAD and failures[node][0] not in PROVEN_BAD):
                failures[node] = (found[0], found[1])
        return failures

    def _require_image(self) -> Arriving:
        if self._image is None:
            raise UnreadableError("no image was opened")
        return self._image


def _told(problem: ElasticResumeError | None) -> list[str] | None:
    return [problem.kind, str(problem)] if isinstance(problem, CheckpointError) else None


def _bare(manifest: Manifest) -> Manifest:
    """A manifest for another rank: the digests of blocks travel with them, and the plan knows the size."""
    return replace(manifest, blocks=(), file_bytes=0)
