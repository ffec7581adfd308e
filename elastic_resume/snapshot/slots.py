"""Slots: memory that outlives workers, and the page of words by which its users agree without asking.

A slot is an anonymous file (memfd) that the node's keeper owns and its workers map. It describes itself::

    [0, image_bytes)   the image: byte for byte the safetensors file that a checkpoint holds
    static             JSON that changes with the layout only; see `note`
    dynamic            JSON of this snapshot

So any layout that fits may be written into it. Beside the slots lies the control block, a page of aligned
words of eight bytes, of which each has one writer: a reader sees the old value or the new one. A snapshot
is named by its *mark*, one word made of generation and step. The node's lead takes a slot's ``target`` away,
writes what only it writes, and sets ``target`` to the new mark; each local rank copies its share and
then stores the mark as its own. A slot counts when target and all those marks are the same, so one that
somebody died over never does.

Readers do not lock. The keeper says which mark it ``held`` while it reads a slot, so that the lead takes
another, and looks again when it has read: what was taken away meanwhile is not used. On x86 stores are seen
in the order in which they were made, and between a store and a read that must not overtake it lie thousands
of instructions, locked ones among them. Elsewhere each access has a barrier on either side (`ordering`).

Does not know torch, disks or sockets.

What a slot says of its image: two pieces of JSON beside it, which make the manifest of a checkpoint.

``static`` changes with the layout only, so it is written once and not at every step::

    {"run_id", "node", "rank", "world_size", "writer", "follows_rank0": [...], "state": {...}}

``dynamic`` is of this snapshot: ``{"generation", "position": {...}, "written_at", "state": {...}}``. The
two states are merged: see `merge`. Does not know what they mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from elastic_resume.checkpoint.json_codec import TAG
from elastic_resume.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest, Position
from elastic_resume.errors import CorruptError
from elastic_resume.snapshot import memory_order
from elastic_resume.snapshot.memory_order import SharedWords
from elastic_resume.snapshot.progress_page import MAX_LOCAL_RANKS

MAX_SLOTS = 8  # three in use, and as many again while a larger layout takes their place
PAGE_BYTES = 4096
SMALL_SLOT_BYTES = (
    64 << 20
)  # a slot of that size is made, mapped and populated in some 50 ms: not worth a thread
COPY_FAILED = 1  # a rank's mark where its copy failed; no snapshot has it
_STEP_BITS = 40
_MAX_GENERATION = 1 << 23
_HEADER_WORDS = 16  # of the control block: see `_HEAD`
_HEADER_FIELDS = (
    "decided_id",
    "next_snapshot_step",
    "commits",
    "commit_us",
    "commit_cpu_us",
    "digest_cpu_us",
)
_SLOT_FIELDS = (
    "serial", "capacity", "target", "parts", "image_bytes", "static_offset", "static_bytes", "dynamic_offset",
    "dynamic_bytes", "layout", "watermark", "commit_requested", "pinned", "committed", "static_digest", "dynamic_digest", "soft_pinned",
)  # fmt: skip
_FIELD_INDEX = {name: at for at, name in enumerate(_SLOT_FIELDS)}
_RANK_IDS_START = len(_SLOT_FIELDS)  # of a record: behind its fields
_RECORD_WORDS = _RANK_IDS_START + MAX_LOCAL_RANKS
# Local ranks say here that they are copying: a guard reads it at this place, so that it lets them finish.
COPYING_START = _HEADER_WORDS
AWAITING_SLOT = 1 << 63  # beside what a local rank copies: it may never do so, nobody should wait for it
_RECORDS_START = COPYING_START + MAX_LOCAL_RANKS
CONTROL_BLOCK_BYTES = -(-(_RECORDS_START + MAX_SLOTS * _RECORD_WORDS) * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, which Python's mmap does not name
_POPULATE_CHUNK_BYTES = 32 << 20
_MFD_NOEXEC_SEAL = 0x0008
_F_SEAL_SHRINK_GROW = 0x0002 | 0x0004
_F_ADD_SEALS = 1033
_libc = ctypes.CDLL(None, use_errno=True)


def encode_snapshot_id(generation: int, step: int, *, epoch_ended: bool = False) -> int:
    """One word for a snapshot: greater is newer.

    ``epoch_over``: the second snapshot of a step that ended an epoch, when all else of the epoch is done.

    Raises:
        ValueError: the generation is not in 1 to 2**23 - 1, or the step not in 0 to 2**40 - 1.

    """
    if not 0 < generation < _MAX_GENERATION or not 0 <= step < 1 << _STEP_BITS:
        raise ValueError(f"no mark for generation {generation}, step {step}")
    return ((generation << _STEP_BITS | step) << 1) | int(epoch_ended)


def decode_snapshot_id(snapshot_id: int) -> tuple[int, int]:
    """(generation, step) of a mark."""
    return snapshot_id >> (_STEP_BITS + 1), (snapshot_id >> 1) & ((1 << _STEP_BITS) - 1)


# ---- decisions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotState:
    """What the control block says of one slot at one moment.

    ``whole``: it counts. ``held``: it is being committed, or sent. ``read``: it is being compared, no more.
    """

    index: int
    serial: int
    capacity: int
    target: int
    complete: bool
    commit_requested: int = 0
    pinned: int = 0
    committed: int = 0
    soft_pinned: int = 0

    @property
    def needs_commit(self) -> bool:
        """Whether it is to be committed, and is not yet."""
        return self.complete and self.commit_requested == self.target and self.committed != self.target


def newest_complete(states: Sequence[SlotState]) -> SlotState | None:
    """The newest slot that counts."""
    return max((state for state in states if state.complete), key=lambda state: state.target, default=None)


def choose_overwritable(states: Sequence[SlotState], *, is_only_slot: bool = False) -> SlotState | None:
    """The slot that the lead may overwrite, of those that are large enough; None: none just now.

    Never the newest one that counts, except where it is the only slot and is on disk, or where there will be
    no other (``only``); never one that the keeper holds or is still to commit. One that is only compared goes
    last, where there are three: else a commit, a comparison and the newest would cost the next step its copy.
    Of two, a step now and then may lack a copy, or nothing of a large state would ever be compared.
    """
    last = newest_complete(states)
    gives_way = len(states) > 2
    free = [
        state
        for state in states
        if not state.pinned
        and not state.needs_commit
        and (gives_way or not state.soft_pinned)
        and (state is not last or (len(states) == 1 and (is_only_slot or state.committed == state.target)))
    ]
    # What counts for nothing goes first, then the oldest.
    return min(
        free,
        key=lambda state: (state.soft_pinned != 0, state.complete, state.target, state.index),
        default=None,
    )


def next_to_commit(states: Sequence[SlotState]) -> SlotState | None:
    """The slot that the keeper commits next: the newest that the lead wants committed."""
    return newest_complete([state for state in states if state.needs_commit])


# ---- the words -----------------------------------------------------------------------------------------


class ControlBlock:
    """The control block, mapped by one process."""

    def __init__(self, descriptor: int) -> None:
        """Map the block; ``descriptor`` stays the caller's."""
        self._is_closed = False
        self._map = mmap.mmap(descriptor, CONTROL_BLOCK_BYTES)
        words = (ctypes.c_uint64 * (CONTROL_BLOCK_BYTES // 8)).from_buffer(self._map)
        self._words = memory_order.with_barriers(words)

    @staticmethod
    def create() -> int:
        """Make a block in which nothing is said; give its descriptor."""
        return create_memory_file("elastic_resume-control", CONTROL_BLOCK_BYTES)

    def get(self, name: str) -> int:
        """Read a word of its head: ``decided`` and ``next_step`` are the lead's, the others the keeper's."""
        return int(self._words[_HEADER_FIELDS.index(name)])

    def set(self, name: str, value: int) -> None:
        """Store one of those."""
        self._words[_HEADER_FIELDS.index(name)] = value

    def record_commit_cost(self, seconds: float, cpu_s: float) -> None:
        """Tell what the last commit took, and of processors: by that the lead judges how often to save."""
        self.set("commit_us", int(seconds * 1e6))
        self.set("commit_cpu_us", int(cpu_s * 1e6))
        self.set("commits", self.get("commits") + 1)

    def set_copying(self, local_rank: int, snapshot_id: int, *, awaiting_slot: bool = False) -> None:
        """Say that ``local_rank`` copies its share of ``mark``; 0: no more. ``waits``: to hear where to."""
        self._words[COPYING_START + local_rank] = (
            snapshot_id | AWAITING_SLOT if awaiting_slot else snapshot_id
        )

    def is_copying_older(self, local_ranks: Iterable[int], snapshot_id: int) -> bool:
        """Whether one of those ranks still copies into an older snapshot than ``mark``."""
        return any(
            0 < self._words[COPYING_START + rank] & ~AWAITING_SLOT < snapshot_id for rank in local_ranks
        )

    def slot_record(self, index: int) -> SlotRecord:
        """Give the words of the slot ``index``. Raises ValueError when the mapping has been given back."""
        if self._is_closed:
            raise ValueError("there are no slots any more")
        return SlotRecord(self._words, index)

    def close(self) -> None:
        """Give the mapping back. No word may be asked for any more."""
        self._is_closed = True
        del self._words
        with contextlib.suppress(BufferError):  # a record of it is still held: it goes with that
            self._map.close()

    def read_slots(self) -> list[SlotState]:
        """Read all slots that exist."""
        records = (self.slot_record(index) for index in range(MAX_SLOTS))
        return [record.read_state() for record in records if record.get("capacity")]


class SlotRecord:
    """The words of one slot."""

    __slots__ = ("_at", "_words", "index")

    def __init__(self, words: SharedWords, index: int) -> None:
        self.index = index
        self._words = words
        self._at = _RECORDS_START + index * _RECORD_WORDS

    def get(self, name: str) -> int:
        """Read one of the fields."""
        return int(self._words[self._at + _FIELD_INDEX[name]])

    def set(self, name: str, value: int) -> None:
        """Store one of the fields. Each is one process's to write."""
        self._words[self._at + _FIELD_INDEX[name]] = value

    def set_copied(self, local_rank: int, snapshot_id: int) -> None:
        """Say that ``local_rank`` has copied all that it has to of the snapshot ``mark``."""
        self._words[self._at + _RANK_IDS_START + local_rank] = snapshot_id

    def complete_snapshot_id(self) -> int:
        """The mark of the snapshot that lies here whole; 0 when none does."""
        target, parts = self.get("target"), self.get("parts")
        if not target or not 0 < parts <= MAX_LOCAL_RANKS:
            return 0
        at = self._at + _RANK_IDS_START
        return target if all(word == target for word in self._words[at : at + parts]) else 0

    def has_failed_copy(self) -> bool:
        """Whether a local rank could not copy its share."""
        at = self._at + _RANK_IDS_START
        return COPY_FAILED in self._words[at : at + min(self.get("parts"), MAX_LOCAL_RANKS)]

    def read_state(self) -> SlotState:
        """Read what decisions are made of."""
        target = self.get("target")
        return SlotState(
            self.index,
            self.get("serial"),
            self.get("capacity"),
            target,
            complete=target != 0 and self.complete_snapshot_id() == target,
            commit_requested=self.get("commit_requested"),
            pinned=self.get("pinned"),
            committed=self.get("committed"),
            soft_pinned=self.get("soft_pinned"),
        )

    def reset(self) -> None:
        """Make it a slot in which nothing lies. For the keeper, when nobody uses it."""
        self.set("target", 0)
        for name in _SLOT_FIELDS[3:]:
            self.set(name, 0)
        for rank in range(MAX_LOCAL_RANKS):
            self.set_copied(rank, 0)


class Slot:
    """A slot, mapped by one process."""

    def __init__(self, descriptor: int, capacity: int, serial: int, record: SlotRecord) -> None:
        """Map it; ``descriptor`` stays the caller's. The kernel grants no less than ``capacity`` bytes."""
        self.index = record.index
        self.serial = serial
        self.capacity = capacity
        self.record = record
        self._map = mmap.mmap(descriptor, capacity)
        self.memory = memoryview(self._map)

    @property
    def watermark(self) -> int:
        """Bytes of the image that are in place and verified, while a resume fills the slot."""
        return self.record.get("watermark")

    @watermark.setter
    def watermark(self, count: int) -> None:
        self.record.set("watermark", count)

    def write_metadata(
        self, header: bytes, image_bytes: int, static: bytes, dynamic: bytes, layout_id: int
    ) -> None:
        """Write what belongs to the image. The lead calls it while the slot has no target.

        ``header`` and ``static`` are left alone where the same ``layout``, a number that stands for both,
        lies here already.
        """
        record, at = self.record, round_up_to_page(image_bytes)
        if record.get("layout") != layout_id:
            record.set("layout", 0)
            self.memory[: len(header)] = header
            self.memory[at : at + len(static)] = static
            record.set("image_bytes", image_bytes)
            record.set("static_offset", at)
            record.set("static_bytes", len(static))
            record.set("static_digest", self._static_digest(static))
            record.set("layout", layout_id)
        at = round_up_to_page(at + record.get("static_bytes"))
        if at + len(dynamic) > self.capacity:
            raise ValueError(f"a slot of {self.capacity} bytes has no room for {len(dynamic)} at {at}")
        self.memory[at : at + len(dynamic)] = dynamic
        record.set("dynamic_offset", at)
        record.set("dynamic_bytes", len(dynamic))
        record.set("dynamic_digest", xxhash.xxh3_64_intdigest(dynamic))

    def image(self) -> memoryview:
        """The image that the words speak of.

        Raises:
            ValueError: they speak of more than there is.

        """
        return self._view(0, self.record.get("image_bytes"))

    def read_metadata(self) -> tuple[bytes, bytes]:
        """Static and dynamic JSON; ValueError as in `image`, and where they or the header are damaged.

        The image has no digest before it is sent or committed. What says how to read it has one: all ranks
        take it from the source, and would blame their own copies for what is wrong with it.
        """
        get = self.record.get
        static = bytes(self._view(get("static_offset"), get("static_bytes")))
        dynamic = bytes(self._view(get("dynamic_offset"), get("dynamic_bytes")))
        found = (self._static_digest(static), xxhash.xxh3_64_intdigest(dynamic))
        if found != (get("static_digest"), get("dynamic_digest")):
            raise ValueError("its header or notes are not what was written")
        return static, dynamic

    def populate(self) -> None:
        """Have the kernel map all pages now, so that no copy waits for it; in pieces, without the GIL.

        A first store into a page costs thirty times one into a mapped page.
        """
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for at in range(0, self.capacity, _POPULATE_CHUNK_BYTES):
            size = min(_POPULATE_CHUNK_BYTES, self.capacity - at)
            if _libc.madvise(ctypes.c_void_p(base + at), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
                return  # Linux before 5.14: the first copy does it

    def _static_digest(self, static: bytes) -> int:
        """Of the header, which lies in place, and of what goes with it."""
        size = min(8 + int.from_bytes(self.memory[:8], "little"), self.capacity)
        return xxhash.xxh3_64_intdigest(xxhash.xxh3_64_digest(self.memory[:size]) + static)

    def _view(self, start: int, size: int) -> memoryview:
        if not 0 <= start <= start + size <= self.capacity:
            raise ValueError(f"bytes {start} to {start + size} of a slot of {self.capacity}")
        return self.memory[start : start + size]


def round_up_to_page(count: int) -> int:
    """``count`` rounded up to whole pages."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def required_slot_bytes(image_bytes: int, static_bytes: int, dynamic_bytes: int) -> int:
    """Bytes that a slot for such snapshots should have: what is dynamic may grow."""
    return (
        round_up_to_page(image_bytes)
        + round_up_to_page(static_bytes)
        + round_up_to_page(2 * dynamic_bytes + (64 << 10))
    )


def create_memory_file(name: str, size: int) -> int:
    """Make an anonymous file of ``size`` bytes, all of them taken now; give its descriptor.

    Taken now, because a store into a page that cannot be had is a SIGBUS; sealed, because one behind the
    end of a file that somebody cut off is one as well. posix_fallocate took 0.13 s for 600 MB, touching the
    pages 0.6 s. Not /dev/shm: containers give that 64 MB, and a file there stays behind.

    Raises:
        OSError: there is no memory for it.

    """
    try:  # a hardened kernel (vm.memfd_noexec=2) refuses a file that might be executed
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError:  # older than Linux 6.3, which does not know the flag
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        for at in range(0, size, _POPULATE_CHUNK_BYTES):
            os.posix_fallocate(descriptor, at, min(_POPULATE_CHUNK_BYTES, size - at))
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_MERGE_DEPTH = 3  # an object, its param_groups, one group: below that nothing static lies beside what moves


def merge_state(static: Mapping[str, Any], dynamic: Mapping[str, Any]) -> dict[str, Any]:
    """Put the typed JSON of a state together; what both hold is the dynamic one's.

    Where both hold a plain object (an optimizer: its state, and its groups) they are merged, in the order of
    the static one. So are lists of one length: of a param group the parameters' numbers are static, the
    learning rate is not. Parts of both are shared with the result, and neither is changed.
    """
    return _merge_objects(static, dynamic, _MERGE_DEPTH)


def _merge_objects(static: Mapping[str, Any], dynamic: Mapping[str, Any], depth: int) -> dict[str, Any]:
    over = {key: _merge(static[key], v, depth) if key in static else v for key, v in dynamic.items()}
    return {**static, **over}


def _merge(static: Any, dynamic: Any, depth: int) -> Any:
    if depth and type(static) is type(dynamic) is dict and TAG not in static and TAG not in dynamic:
        return _merge_objects(static, dynamic, depth - 1)
    if depth and type(static) is type(dynamic) is list and len(static) == len(dynamic):
        return [_merge(s, d, depth - 1) for s, d in zip(static, dynamic, strict=True)]
    return dynamic


def encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Give one of the two as it lies in the slot."""
    return json.dumps(metadata, separators=(",", ":"), allow_nan=False).encode()


def dynamic_metadata(
    generation: int, position: Position, written_at: float, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Give the dynamic part."""
    where = {name: getattr(position, name) for name in ("epoch", "step_in_epoch", "step", "samples")}
    return {"generation": generation, "position": where, "written_at": written_at, "state": state}


def build_manifest(static: bytes, dynamic: bytes, image_bytes: int) -> Manifest:
    """Give the manifest of a snapshot; its blocks have no digests yet.

    Raises:
        CorruptError: the two are not what a worker writes.

    """
    if len(static) + len(dynamic) > MAX_MANIFEST_BYTES:
        raise CorruptError(f"snapshot: {len(static) + len(dynamic)} bytes of notes.")
    try:
        fixed, moving = json.loads(static), json.loads(dynamic)
        state = merge_state(fixed.pop("state"), moving.pop("state"))
        position = Position(**moving.pop("position"))
        follows = tuple(fixed.pop("follows_rank0"))
        return Manifest(
            **fixed, **moving, position=position, follows_rank0=follows, state=state, file_bytes=image_bytes
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"snapshot: its notes are not what a worker writes ({error!r}).") from error
