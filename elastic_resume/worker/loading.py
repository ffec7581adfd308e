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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import xxhash
from torch import nn

from elastic_resume.errors import (
    CheckpointError,
    CorruptError,
    ElasticResumeError,
    MachineError,
    TornError,
    UnreadableError,
)
from elastic_resume.policy import source
from elastic_resume.policy.source import MEMORY, Copy, ResumePlan, Stream
from elastic_resume.store import checkpoint
from elastic_resume.store.checkpoint import fresh_memory
from elastic_resume.store.manifest import Manifest
from elastic_resume.store.shelf import Shelf
from elastic_resume.store.slots import Slot
from elastic_resume.worker import overlay, restoring, transfer
from elastic_resume.worker.arriving import Arriving, Copies, Private, Task, is_own
from elastic_resume.worker.overlay import Overlay
from elastic_resume.worker.place import Place
from elastic_resume.worker.world import Channel

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
            self._follows = overlay.describe(layout, self._own.follows_rank0)
        return xxhash.xxh3_128_hexdigest(layout.header)

    def _open_snapshot(self, copy: Copy) -> None:
        held = self._memory.newest() if self._memory is not None else None
        if held is None or (*held.order, held.manifest.position.epoch) != (*copy.order, copy.epoch):
            raise UnreadableError("the snapshot in this node's memory is there no more")
        self._own, self._slot = held.manifest, held.slot
        self._image = Arriving.whole(held.image)

    def _open_checkpoint(self, copy: Copy) -> None:
        path = self._place.path_of(copy)
        manifest = checkpoint.quick_check(path, self._place.settings.run_id)
        self.on_disk = copy.home == self._place.node
        self._own = manifest
        image = self._take_slot(self._own) if self._place.leads else None
        if image is not None:
            into, arrived = image.memory, image.advance
            task = Task("fill", lambda: checkpoint.read_image(path, manifest, into, arrived), image)
        else:
            # Its bytes are sent and copied on at once, and dropped: no memory is touched for them.
            mapping = checkpoint.map_unverified(path, manifest)
            image = Arriving(memoryview(mapping), Private())
            arrived = image.advance
            task = Task("fill", lambda: checkpoint.verify_mapping(path, manifest, mapping, arrived), image)
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
        follows = overlay.parse(told[1], plan.nbytes)
        # Where all load the same copy they have the same values.
        self._values = Overlay(follows if len(plan.holders) > 1 else ())
        for stream in source.streams(plan):
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
            restoring.load(
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
            own = checkpoint.quick_check(path, self._place.settings.run_id)
            self._load_image(tracked, self.manifest, Arriving.whole(checkpoint.map_image(path, own)))

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
