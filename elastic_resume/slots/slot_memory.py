"""Define the memory layout and the lock-free protocol of slots, the shared memory of a node's snapshots.

The memory outlives the workers. A *slot* is an anonymous file (memfd) that the committer owns and the workers
map. It describes itself:

    [0, image_bytes)   the image: byte for byte the safetensors file of a checkpoint
    static             JSON that changes with the layout only: run_id, node, rank, world_size, writer,
                       rank0_tensors, ways_back, and the constant part of the state
    dynamic            JSON of this snapshot: generation, position, written_at, and the rest of the state

`Slot.read_snapshot` merges the two into a checkpoint's manifest. Beside the slots lies the *control block*, a
page of aligned 8-byte words. A *snapshot id* is one word made of generation and step; a greater id is newer.

Each word has one writing process (`shared_page`), so no store is lost:

    agent          serial, capacity, pinned, soft_pinned, committed of each slot; commit_step;
                   planned_end_ms; costs of commits and readers
    local leader   all other words of each slot; decided_id, next_snapshot_step, replayed_id
    local rank r   copied[r] of each slot, copying[r]; any of them sets copies_at_once, to 1 only

The agent is the process that runs the committer. The workers of a generation start after those of the
previous one have ended. So there is one local leader, local rank 0, at a time.

Writing a snapshot:

    local leader: snapshot_id = 0, copied[0] = 0 -> written_serial = serial -> metadata -> snapshot_id = id
    each local rank: copies its share -> copied[r] = id
    complete: written_serial equals serial, and copied[r] equals snapshot_id for each of share_count ranks

Why a complete slot is whole, in each interleaving:

- A writer that dies leaves ``copied`` incomplete. Only a snapshot's own ranks store its id, after their copy.
- An id is announced again after a failed try. The local leader then copies alone, so only ``copied[0]``
  counts, and it was cleared first. With a sharded model all ranks try again, and ``copied`` of another rank
  may be of the earlier try: its bytes are the same unless the script has changed the state meanwhile.
- The agent may drop a slot and give its record to a new one while a worker writes. The worker announces the
  old serial, so the new slot stays incomplete; ``plan_id`` is not trusted across serials either.
- A reader checks again, after it has read, that the slot is still complete. This fails if the slot was taken
  meanwhile, unless the same id is complete again. So a reader first stores the id as ``pinned`` or
  ``soft_pinned``, then checks; `Slot.take` first clears the id, then refuses a slot that is pinned for the
  same id. One of the two sees the other's store. A pin for another id only keeps the slot from being chosen.
- A rank that copies a share late has stored ``copying`` before it read the slot's ``share_count``. The local
  leader has cleared that before it reads ``copying``, and then takes the slot from no such rank, also for
  another try of the same id.
- A slot is discarded by the local leader alone, so a late message never clears a newer snapshot.

This needs stores to become visible in program order, and barriers where `shared_page` says so.
`tests/unit/slots/test_interleavings.py` tries the orders, also of protocols without one of these rules.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from elastic_resume import linux, shared_page
from elastic_resume.checkpoint.atomic_io import memory_address
from elastic_resume.checkpoint.json_codec import TAG
from elastic_resume.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest, Position, parse_ways_back
from elastic_resume.errors import CorruptError, MachineError
from elastic_resume.shared_page import SharedPage
from elastic_resume.slots.progress_page import MAX_LOCAL_RANKS

MAX_SLOTS = 8  # three in use, three larger ones that replace them, and two spare
PAGE_BYTES = 4096
SMALL_SLOT_BYTES = 64 << 20  # created, mapped and populated in some 50 ms, so no thread is needed
_METADATA_HEADROOM_BYTES = 1 << 18  # reserved for metadata while its size is unknown
COPY_FAILED = 1 << 63  # flag on the snapshot id that a rank stores when its copy failed
_STEP_BITS = 40
_MAX_GENERATION = 1 << 22  # so an id leaves bit 63 to the flags
_HEADER_WORDS = 16
_HEADER_FIELDS = (
    *("decided_id", "next_snapshot_step", "commit_us", "commit_cpu_us", "read_cpu_us"),
    *("copies_at_once", "replayed_id", "commit_step", "planned_end_ms"),
)
_SLOT_FIELDS = (
    "serial", "capacity", "pinned", "soft_pinned", "committed",
    "snapshot_id", "written_serial", "share_count", "commit_requested", "loaded_id", "watermark", "plan_id",
    "image_bytes", "static_offset", "static_bytes", "dynamic_offset", "dynamic_bytes",
    "static_digest", "dynamic_digest",
)  # fmt: skip
_FIELD_INDEX = {name: at for at, name in enumerate(_SLOT_FIELDS)}
_COPIED_START = len(_SLOT_FIELDS)  # index within a record
_RECORD_WORDS = _COPIED_START + MAX_LOCAL_RANKS
# The snapshot id that each local rank is copying. The worker supervisor reads these words at this offset, to
# let a copy finish before it ends the worker.
COPYING_START = _HEADER_WORDS
AWAITING_SLOT = 1 << 63  # flag on a copying word: the rank has no slot yet, so do not wait for its copy
_RECORDS_START = COPYING_START + MAX_LOCAL_RANKS
CONTROL_BLOCK_BYTES = -(-(_RECORDS_START + MAX_SLOTS * _RECORD_WORDS) * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23  # from linux/mman.h; Python's mmap lacks it
_POPULATE_CHUNK_BYTES = 32 << 20
_F_SEAL_SHRINK_GROW = 0x0002 | 0x0004
_F_ADD_SEALS = 1033
_MERGE_DEPTH = 3  # an object, its param_groups, one group; deeper levels are wholly static or dynamic
_libc = ctypes.CDLL(None, use_errno=True)


def encode_snapshot_id(generation: int, step: int, *, is_epoch_over: bool = False) -> int:
    """Return the one-word id of a snapshot; a greater id is newer.

    ``is_epoch_over`` marks the second snapshot of an epoch's last step, taken after the script's end-of-epoch
    code.

    Raises:
        ValueError: the generation is not in 1 to 2**22 - 1, or the step not in 0 to 2**40 - 1.

    """
    if not 0 < generation < _MAX_GENERATION or not 0 <= step < 1 << _STEP_BITS:
        raise ValueError(f"generation {generation}, step {step} does not fit into a snapshot id")
    return ((generation << _STEP_BITS | step) << 1) | int(is_epoch_over)


def decode_snapshot_id(snapshot_id: int) -> tuple[int, int]:
    """Return (generation, step) of a snapshot id."""
    return snapshot_id >> (_STEP_BITS + 1), (snapshot_id >> 1) & ((1 << _STEP_BITS) - 1)


# ---- decisions about slots -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotState:
    """The state of one slot at one moment; the fields from ``commit_requested`` on hold snapshot ids.

    ``snapshot_id``: announced by the local leader, 0 for none. ``complete``: all shares are copied.
    ``pinned``: it is being committed. ``soft_pinned``: it is only being digested for a comparison.
    """

    index: int
    serial: int
    capacity: int
    snapshot_id: int
    complete: bool
    commit_requested: int = 0
    pinned: int = 0
    committed: int = 0
    soft_pinned: int = 0

    @property
    def needs_commit(self) -> bool:
        """Whether its snapshot is to be committed and is not committed yet."""
        return self.complete and self.commit_requested == self.snapshot_id != self.committed


def newest_complete(states: Sequence[SlotState]) -> SlotState | None:
    """Return the slot with the newest complete snapshot."""
    return next(iter(list_complete(states)), None)


def list_complete(states: Sequence[SlotState]) -> list[SlotState]:
    """Return the slots with complete snapshots, newest first."""
    return sorted((s for s in states if s.complete), key=lambda s: s.snapshot_id, reverse=True)


def choose_overwritable(states: Sequence[SlotState], *, is_only_slot: bool = False) -> SlotState | None:
    """Return the slot that the local leader may overwrite now; None if there is none.

    The newest complete snapshot stays, unless it is in the only slot and either committed or without a second
    slot to come (``is_only_slot``). Pinned slots and those waiting for a commit stay too. A soft-pinned slot
    is taken last and only if there are three: with two, a step may go without a snapshot, or comparisons
    would never finish.
    """
    newest = newest_complete(states)
    may_take_soft_pinned = len(states) > 2
    free = [
        state
        for state in states
        if not state.pinned
        and not state.needs_commit
        and (may_take_soft_pinned or not state.soft_pinned)
        and (
            state is not newest
            or (len(states) == 1 and (is_only_slot or state.committed == state.snapshot_id))
        )
    ]
    # Incomplete slots first, then the oldest snapshot.
    return min(
        free,
        key=lambda state: (state.soft_pinned != 0, state.complete, state.snapshot_id, state.index),
        default=None,
    )


def next_to_commit(states: Sequence[SlotState]) -> SlotState | None:
    """Return the slot to commit next: the newest that needs a commit."""
    return newest_complete([state for state in states if state.needs_commit])


# ---- shared memory -------------------------------------------------------------------------------------


class ControlBlock:
    """The control block, mapped by one process."""

    def __init__(self, descriptor: int) -> None:
        """Map the block; the caller keeps ``descriptor``."""
        self._page = SharedPage(descriptor, CONTROL_BLOCK_BYTES, shared_page.COUNTS)
        self._words = self._page.words

    @staticmethod
    def create() -> int:
        """Create a zeroed block and return its descriptor."""
        return create_memory_file("elastic_resume-control", CONTROL_BLOCK_BYTES)

    def get(self, name: str) -> int:
        """Read a header word.

        All local ranks take part in the snapshot of ``next_snapshot_step``, and wait for its slot.
        ``decided_id`` ends their waiting: it is the id of the newest snapshot that has got a slot, or will
        have none. ``copies_at_once`` is 1 if the script has changed state that was being copied.
        ``replayed_id``: the newest snapshot whose steps a generation has begun to compute again (`proof`).
        ``commit_step``: a step that all nodes commit, since a mechanism needs the same one of them; or 0.
        ``planned_end_ms``: 0 unless the view is to end. Then each step is to have a snapshot, and a drained
        worker may end from this time of the monotonic clock on.
        """
        return int(self._words[_HEADER_FIELDS.index(name)])

    def set(self, name: str, value: int) -> None:
        """Store a header word."""
        self._words[_HEADER_FIELDS.index(name)] = value

    def set_copying(self, local_rank: int, snapshot_id: int, *, awaiting_slot: bool = False) -> None:
        """Record which snapshot ``local_rank`` copies, 0 for none; it may still await its slot."""
        self._words[COPYING_START + local_rank] = snapshot_id | (AWAITING_SLOT if awaiting_slot else 0)
        shared_page.barrier()

    def is_copying(self, local_ranks: Iterable[int], snapshot_id: int) -> bool:
        """Whether one of these ranks still copies an older snapshot, or an earlier try of this one."""
        copying = [self._words[COPYING_START + rank] for rank in local_ranks]
        return any(0 < word & ~AWAITING_SLOT < snapshot_id or word == snapshot_id for word in copying)

    def slot_record(self, index: int) -> SlotRecord:
        """Return the words of slot ``index``; raise ValueError after `close`."""
        if self._words is shared_page.CLOSED:
            raise ValueError("the slots of this node are closed")
        return SlotRecord(self._words, index)

    def close(self) -> None:
        """Unmap the block."""
        self._words = shared_page.CLOSED
        self._page.close()

    def read_slots(self) -> list[SlotState]:
        """Return the states of all existing slots."""
        records = (self.slot_record(index) for index in range(MAX_SLOTS))
        return [record.read_state() for record in records if record.get("capacity")]


class SlotRecord:
    """The words of one slot in the control block."""

    __slots__ = ("_at", "_words", "index")

    def __init__(self, words: Any, index: int) -> None:
        self.index = index
        self._words = words
        self._at = _RECORDS_START + index * _RECORD_WORDS

    def get(self, name: str) -> int:
        """Read a field."""
        return int(self._words[self._at + _FIELD_INDEX[name]])

    def set(self, name: str, value: int) -> None:
        """Store a field; the module's docstring says which process may."""
        self._words[self._at + _FIELD_INDEX[name]] = value

    def set_copied(self, local_rank: int, snapshot_id: int) -> None:
        """Record that ``local_rank`` has copied its share of ``snapshot_id``."""
        self._words[self._at + _COPIED_START + local_rank] = snapshot_id

    def announced_id(self) -> int:
        """Return the id of the snapshot that this slot holds or is about to hold; 0 for none."""
        snapshot_id = self.get("snapshot_id")
        return snapshot_id if self.get("written_serial") == self.get("serial") else 0

    def complete_snapshot_id(self) -> int:
        """Return the id of the complete snapshot in this slot, else 0."""
        snapshot_id, share_count = self.announced_id(), self.get("share_count")
        if not snapshot_id or not 0 < share_count <= MAX_LOCAL_RANKS:
            return 0
        start = self._at + _COPIED_START
        copied_ids = self._words[start : start + share_count]
        return snapshot_id if all(copied_id == snapshot_id for copied_id in copied_ids) else 0

    def has_failed_copy(self) -> bool:
        """Whether a local rank failed to copy its share of the announced snapshot."""
        start = self._at + _COPIED_START
        copied_ids = self._words[start : start + min(self.get("share_count"), MAX_LOCAL_RANKS)]
        return self.announced_id() | COPY_FAILED in copied_ids

    def read_state(self) -> SlotState:
        """Read the fields on which decisions depend."""
        get, snapshot_id = self.get, self.announced_id()
        is_loaded = get("loaded_id") == snapshot_id
        return SlotState(
            index=self.index,
            serial=get("serial"),
            capacity=get("capacity"),
            snapshot_id=snapshot_id,
            complete=snapshot_id != 0 and self.complete_snapshot_id() == snapshot_id,
            commit_requested=get("commit_requested"),
            pinned=get("pinned"),
            committed=snapshot_id if is_loaded else get("committed"),
            soft_pinned=get("soft_pinned"),
        )


class Slot:
    """A slot, mapped by one process."""

    def __init__(self, descriptor: int, capacity: int, serial: int, record: SlotRecord) -> None:
        """Map the slot; the caller keeps ``descriptor``."""
        self.index = record.index
        self.serial = serial
        self.capacity = capacity
        self.record = record
        self._map = mmap.mmap(descriptor, capacity)
        self.memory = memoryview(self._map)

    @property
    def watermark(self) -> int:
        """Verified bytes from the image's start, while a resume fills the slot."""
        return self.record.get("watermark")

    @watermark.setter
    def watermark(self, count: int) -> None:
        self.record.set("watermark", count)

    def take(self, snapshot_id: int) -> bool:
        """As local leader, take the slot to write ``snapshot_id``; return False if it must not be written.

        Until `announce`, the slot holds no snapshot.
        """
        record = self.record
        record.set("snapshot_id", 0)
        record.set("share_count", 0)
        record.set_copied(0, 0)
        if record.get("written_serial") != self.serial:
            record.set("plan_id", 0)
            record.set("written_serial", self.serial)
        shared_page.barrier()
        return snapshot_id not in {record.get("pinned"), record.get("soft_pinned")}

    def announce(self, snapshot_id: int, *, share_count: int = 1, commit_requested: bool = False) -> None:
        """As local leader, announce the snapshot whose metadata is written, for the ranks that copy it."""
        self.record.set("share_count", share_count)
        self.record.set("commit_requested", snapshot_id if commit_requested else 0)
        self.record.set("snapshot_id", snapshot_id)

    def write_metadata(
        self, header: bytes, image_bytes: int, static: bytes, dynamic: bytes, plan_id: int
    ) -> None:
        """Write header and metadata of an image, between `take` and `announce`.

        ``plan_id`` identifies ``header`` and ``static``, which are not written again if they are in this
        slot already.
        """
        record, at = self.record, round_up_to_page(image_bytes)
        if record.get("plan_id") != plan_id:
            record.set("plan_id", 0)
            self.memory[: len(header)] = header
            self.memory[at : at + len(static)] = static
            record.set("image_bytes", image_bytes)
            record.set("static_offset", at)
            record.set("static_bytes", len(static))
            record.set("static_digest", self._static_digest(static))
            record.set("plan_id", plan_id)
        at = round_up_to_page(at + record.get("static_bytes"))
        if at + len(dynamic) > self.capacity:
            raise ValueError(f"a slot of {self.capacity} bytes has no room for {len(dynamic)} bytes at {at}")
        self.memory[at : at + len(dynamic)] = dynamic
        record.set("dynamic_offset", at)
        record.set("dynamic_bytes", len(dynamic))
        record.set("dynamic_digest", xxhash.xxh3_64_intdigest(dynamic))

    def image(self) -> memoryview:
        """Return the image; raise ValueError if the recorded size exceeds the slot."""
        return self._view(0, self.record.get("image_bytes"))

    def read_metadata(self) -> tuple[bytes, bytes]:
        """Return static and dynamic JSON; raise ValueError if a digest does not match.

        The image has no digest before it is sent or committed. The metadata has one, because all ranks take
        it from the source rank and could not tell its damage from their own.
        """
        get = self.record.get
        static = bytes(self._view(get("static_offset"), get("static_bytes")))
        dynamic = bytes(self._view(get("dynamic_offset"), get("dynamic_bytes")))
        digests = (self._static_digest(static), xxhash.xxh3_64_intdigest(dynamic))
        if digests != (get("static_digest"), get("dynamic_digest")):
            raise ValueError("its header or metadata does not match its digest")
        return static, dynamic

    def read_snapshot(self, snapshot_id: int) -> tuple[Manifest, memoryview]:
        """Return manifest and image of the slot's snapshot; the manifest's blocks have no digests yet.

        Raises:
            CorruptError: words or metadata are damaged, or those of another snapshot.

        """
        try:
            image = self.image()
            manifest = _build_manifest(*self.read_metadata(), len(image))
        except ValueError as error:
            raise CorruptError(f"snapshot: {error}.") from error
        if manifest.version != decode_snapshot_id(snapshot_id):
            raise CorruptError(f"snapshot: its metadata is of {manifest.version}, its id {snapshot_id:#x}.")
        return manifest, image

    def populate(self) -> None:
        """Map all pages now; see `populate_pages`."""
        for at in range(0, self.capacity, _POPULATE_CHUNK_BYTES):
            populate_pages(self.memory[at : at + _POPULATE_CHUNK_BYTES])

    def _static_digest(self, static: bytes) -> int:
        """Digest the header in the slot together with the static JSON."""
        size = min(8 + int.from_bytes(self.memory[:8], "little"), self.capacity)
        return xxhash.xxh3_64_intdigest(xxhash.xxh3_64_digest(self.memory[:size]) + static)

    def _view(self, start: int, size: int) -> memoryview:
        if not 0 <= start <= start + size <= self.capacity:
            raise ValueError(f"bytes {start} to {start + size} are outside a slot of {self.capacity} bytes")
        return self.memory[start : start + size]


def populate_pages(memory: memoryview) -> None:
    """Allocate and map the pages of ``memory`` now, without the GIL.

    A store into an unmapped page is thirty times slower.

    Raises:
        MachineError: there is not enough memory.

    """
    address = memory_address(memory)
    start = address - address % mmap.PAGESIZE
    size = ctypes.c_size_t(address + len(memory) - start)
    if _libc.madvise(ctypes.c_void_p(start), size, _MADV_POPULATE_WRITE) != 0:
        error = ctypes.get_errno()
        if error != errno.EINVAL:  # Linux before 5.14; the first store then maps the page
            raise MachineError(
                f"this node has no memory for the state ({os.strerror(error)}): free some, or lower "
                "ELASTIC_RESUME_SNAPSHOT_MEMORY."
            )


@functools.cache
def can_populate_pages() -> bool:
    """Return whether `populate_pages` works on this kernel."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def round_up_to_page(count: int) -> int:
    """Return ``count`` rounded up to whole pages."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def required_slot_bytes(image_bytes: int, static_bytes: int, dynamic_bytes: int) -> int:
    """Return the slot size for such snapshots, with room for the dynamic part to double."""
    return sum(map(round_up_to_page, (image_bytes, static_bytes, 2 * dynamic_bytes + (64 << 10))))


def estimate_slot_bytes(state_bytes: int) -> int:
    """Return the size of a slot for a state whose header and metadata are unknown."""
    return state_bytes + state_bytes // 64 + _METADATA_HEADROOM_BYTES


def create_memory_file(name: str, size: int, *, allocate: bool = True) -> int:
    """Create a sealed anonymous file, by default with all its memory allocated; return its descriptor.

    Allocation and sealing prevent SIGBUS: a store could otherwise hit a page that cannot be allocated or was
    truncated. /dev/shm is not used, because containers limit it to 64 MB and files in it outlive us. With
    ``allocate`` false each writer calls `populate_pages` first, which overlaps with its other work.

    Raises:
        OSError: there is not enough memory.

    """
    descriptor = linux.create_anonymous_file(name, may_seal=True)
    try:
        os.ftruncate(descriptor, size)
        if allocate or not can_populate_pages():
            allocate_memory_file(descriptor, size)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def allocate_memory_file(descriptor: int, size: int) -> None:
    """Allocate the memory of a file of `create_memory_file`; raise OSError if there is not enough."""
    for at in range(0, size, _POPULATE_CHUNK_BYTES):
        os.posix_fallocate(descriptor, at, min(_POPULATE_CHUNK_BYTES, size - at))


def merge_state(
    static: Mapping[str, Any], dynamic: Mapping[str, Any], depth: int = _MERGE_DEPTH
) -> dict[str, Any]:
    """Merge the typed JSON of a state's static and dynamic parts; the dynamic part takes precedence.

    Plain objects present in both are merged in the static order, as are lists of equal length, down to
    ``depth`` levels: in a param group the parameter numbers are static and the learning rate is dynamic. The
    result shares parts of both inputs.
    """
    merged = {key: _merge(static[key], v, depth) if key in static else v for key, v in dynamic.items()}
    return {**static, **merged}


def _merge(static: Any, dynamic: Any, depth: int) -> Any:
    if depth and type(static) is type(dynamic) is dict and TAG not in static and TAG not in dynamic:
        return merge_state(static, dynamic, depth - 1)
    if depth and type(static) is type(dynamic) is list and len(static) == len(dynamic):
        return [_merge(s, d, depth - 1) for s, d in zip(static, dynamic, strict=True)]
    return dynamic


def encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Encode static or dynamic metadata as it lies in the slot."""
    return json.dumps(metadata, separators=(",", ":"), allow_nan=False).encode()


def dynamic_metadata(
    generation: int, position: Position, written_at: float, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the dynamic metadata of one snapshot."""
    return {"generation": generation, "position": vars(position), "written_at": written_at, "state": state}


def _build_manifest(static: bytes, dynamic: bytes, image_bytes: int) -> Manifest:
    size = len(static) + len(dynamic)
    if size > MAX_MANIFEST_BYTES:
        raise CorruptError(f"snapshot: {size} bytes of metadata; the limit is {MAX_MANIFEST_BYTES}.")
    try:
        fields, dynamic_fields = json.loads(static), json.loads(dynamic)
        state = merge_state(fields["state"], dynamic_fields["state"])
        fields |= dynamic_fields | {"state": state, "file_bytes": image_bytes}
        fields["position"] = Position(**fields["position"])
        fields["rank0_tensors"] = tuple(fields["rank0_tensors"])
        fields["ways_back"] = parse_ways_back(fields.get("ways_back", ()))
        return Manifest(**fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"snapshot: its metadata is invalid ({error!r}).") from error
