"""Encode and parse entries of the archive's log, and decide which of them to prune. Pure.

An entry is one line of JSON, then the checkpoint's manifest byte for byte, which ends with its own digest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from elastic_resume import milestone
from elastic_resume.checkpoint.json_codec import reject_constant
from elastic_resume.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from elastic_resume.checkpoint.reader import checkpoint_name, parse_checkpoint_name
from elastic_resume.errors import CheckpointError, CorruptError, ForeignError, NewerFormatError, TornError
from elastic_resume.milestone import Milestone

FORMAT_VERSION = 1
KIND = "elastic_resume archived checkpoint"
MAX_LINE_BYTES = 4096
MAX_ENTRY_BYTES = MAX_LINE_BYTES + MAX_MANIFEST_BYTES
MIN_PART_BYTES = 64 << 20
MAX_PART_BYTES = 4 << 30  # a store takes at most 5 GB in one request
MAX_PARTS = 1000  # more than this only if parts would be greater than MAX_PART_BYTES
MAX_NUMBER = 99_999_999
WRITER_DIGITS = 16
MAX_HISTORY_CHARS = 128
MAX_MILESTONES = 32  # of one entry: its first line has a limit
_BEGIN = f'{{"kind":"{KIND}"'.encode()
_NUMBER = re.compile(r"[0-9]{8}")
_ATTEMPT = re.compile(r"(g\d{6,16}-s\d{10,16})-[0-9a-f]{8,32}")

Moment = tuple[int, int, int]
"""(generation, step, epoch), by which checkpoints are ordered: an epoch's last step may be saved twice."""


@dataclass(frozen=True)
class Attempt:
    """An attempt to archive the checkpoint ``version``: its number in the log, fixed, and its unique id."""

    number: int
    id: str
    version: tuple[int, int]


@dataclass(frozen=True)
class EntryHeader:
    """What an entry says beside the manifest.

    ``parts`` is the attempt that has stored the bytes. It is another one than ``attempt`` if the entry only
    adds milestones to a checkpoint that is archived already; then it has the earlier milestones too.
    Entries with an equal ``history`` have gone back with the same `--resume-from`, or never.
    ``newest`` is the greatest of all entries when this one was put, itself included, so that a reader need
    not read them all; None if one of them cannot be read.
    """

    attempt: str
    part_bytes: int
    parts: str
    epoch: int
    newest: Moment | None
    milestones: tuple[Milestone, ...] = ()
    history: str = ""

    @property
    def version(self) -> tuple[int, int]:
        """(generation, step), by which checkpoints are ordered."""
        return parse_attempt_id(self.attempt) or (0, 0)

    @property
    def moment(self) -> Moment:
        """(generation, step, epoch)."""
        return (*self.version, self.epoch)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the milestones."""
        return tuple(label.name for label in self.milestones)


@dataclass(frozen=True)
class ArchivedCheckpoint:
    """An entry of the log, with the checkpoint's manifest."""

    number: int
    header: EntryHeader
    manifest: Manifest

    @property
    def version(self) -> tuple[int, int]:
        """(generation, step), by which checkpoints are ordered."""
        return self.manifest.version


@dataclass(frozen=True)
class BadEntry:
    """An entry of the log that cannot be read, and why; version and milestones as far as they are known."""

    number: int
    error: CheckpointError
    version: tuple[int, int] | None = None
    milestones: tuple[str, ...] = ()


def make_attempt_id(version: tuple[int, int], nonce: str) -> str:
    """Return the id of an attempt; ``nonce`` is 8 to 32 hexadecimal digits."""
    name = f"{checkpoint_name(*version)}-{nonce}"
    if parse_attempt_id(name) != version:
        raise ValueError(f"{nonce!r} is not 8 to 32 hexadecimal digits")
    return name


def parse_attempt_id(name: str) -> tuple[int, int] | None:
    """Return (generation, step) of an attempt's id; None for any other text."""
    match = _ATTEMPT.fullmatch(name)
    return parse_checkpoint_name(match[1]) if match else None


def is_outdated(attempt: str, other: str) -> bool:
    """Return whether an attempt is merely late if ``other`` has archived, so that a next one may follow.

    The other one is of this job, as of a leader before, or of an older generation: a job that was cut off and
    has found its way back. Otherwise two jobs have the same run id, and this one must archive no more. So of
    two such jobs one goes on.
    """
    own_version, other_version = parse_attempt_id(attempt), parse_attempt_id(other)
    if own_version is None or other_version is None:
        return False
    return other_version[0] < own_version[0] or find_writer(attempt) == find_writer(other)


def find_writer(attempt: str) -> str:
    """Return the job that an attempt is of: the first half of its nonce."""
    return attempt.rpartition("-")[2][:WRITER_DIGITS]


def find_version(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return (generation, step) of an entry of any format; None if it cannot be found."""
    match = re.search(rb'"attempt":\s*"([gs0-9-]{1,64}[0-9a-f-]{1,64})"', bytes(data[:MAX_LINE_BYTES]))
    return parse_attempt_id(match[1].decode()) if match else None


def begins_as_entry(data: bytes | memoryview) -> bool:
    """Return whether an object begins as an entry of any format does: another one may be anybody's."""
    return bytes(data[: len(_BEGIN)]) == _BEGIN


def parse_number(name: str) -> int | None:
    """Return the number of an entry's name; None for any other name."""
    return (int(name) or None) if _NUMBER.fullmatch(name) else None


def choose_part_bytes(file_bytes: int, block_bytes: int) -> int:
    """Return the bytes of a part: whole blocks, 64 MiB, and more for an image over 64 GiB."""
    wanted = min(max(MIN_PART_BYTES, -(-file_bytes // MAX_PARTS)), MAX_PART_BYTES)
    blocks = -(-wanted // block_bytes)
    if blocks > 1 and blocks * block_bytes > MAX_PART_BYTES:
        blocks -= 1
    return blocks * block_bytes


def merge_milestones(known: Iterable[Milestone], more: Iterable[Milestone]) -> tuple[Milestone, ...]:
    """Return the milestones of an entry that adds ``more``, without those whose names are known."""
    merged = {label.name: label for label in known}
    for label in sorted(more, key=lambda label: label.name):
        if len(merged) < MAX_MILESTONES and milestone.is_name(label.name):
            merged.setdefault(label.name, label)
    return tuple(merged.values())


def encode_header(header: EntryHeader) -> bytes:
    """Encode the first line of an entry; raise ValueError if a field is out of range."""
    invalid = _find_invalid_field(header)
    if invalid:
        raise ValueError(invalid)
    milestones = {label.name: label.metric for label in header.milestones}
    record = {"kind": KIND, "format": FORMAT_VERSION, **asdict(header), "milestones": milestones}
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def parse_header(data: bytes | memoryview) -> tuple[EntryHeader, int]:
    """Return the first line of an entry, and its number of bytes; ``data`` may end after it.

    Raises:
        TornError: the line does not end.
        CorruptError: it is not JSON, or a field is wrong.
        ForeignError: it is not an entry of an archive.
        NewerFormatError: a later version of elastic_resume wrote it.

    """
    line, newline, _ = bytes(data[:MAX_LINE_BYTES]).partition(b"\n")
    if not newline:
        raise TornError(f"entry: its first line does not end within {len(line)} bytes.")
    try:
        record = json.loads(line, parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptError("entry: its first line is not JSON.") from error
    if not isinstance(record, dict) or record.pop("kind", None) != KIND:
        raise ForeignError("entry: not one of an archive of elastic_resume.")
    number = record.pop("format", None)
    if type(number) is int and number > FORMAT_VERSION:
        raise NewerFormatError(
            f"entry: format {number}; this elastic_resume reads up to {FORMAT_VERSION}: "
            "upgrade it to load this."
        )
    try:
        header = _make_header(**record)
    except (TypeError, AttributeError) as error:
        raise CorruptError(f"entry: a field is missing, unknown or of a wrong type ({error}).") from error
    invalid = _find_invalid_field(header)
    if type(number) is not int or number < 1 or invalid:
        raise CorruptError(f"entry: {invalid or f'impossible format {number!r}.'}")
    return header, len(line) + 1


def parse_entry(number: int, data: memoryview, run_id: str | None) -> ArchivedCheckpoint:
    """Parse an entry; ``run_id`` None accepts any run.

    Raises:
        CheckpointError: what is wrong.

    """
    if len(data) > MAX_ENTRY_BYTES:
        raise CorruptError(f"entry: more than the limit of {MAX_ENTRY_BYTES} bytes.")
    header, size = parse_header(data)
    manifest = Manifest.parse(bytes(data[size:]))
    if parse_attempt_id(header.attempt) != manifest.version:
        raise CorruptError(f"entry: its manifest is not of the attempt {header.attempt}.")
    if header.history != describe_history(manifest):
        raise CorruptError(f"entry: its history is {header.history!r:.120}, and its manifest's another one.")
    if header.epoch != manifest.position.epoch:
        raise CorruptError(
            f"entry: its epoch is {header.epoch}, and its manifest's {manifest.position.epoch}."
        )
    if header.part_bytes % manifest.block_bytes:
        raise CorruptError(
            f"entry: parts of {header.part_bytes} bytes are no whole blocks of {manifest.block_bytes}."
        )
    if run_id is not None and manifest.run_id != run_id:
        raise ForeignError(f"belongs to the run {manifest.run_id!r}, not to {run_id!r}.")
    return ArchivedCheckpoint(number, header, manifest)


def describe_history(manifest: Manifest) -> str:
    """Return the last way back of a state's history; "" if it never has gone back."""
    if not manifest.ways_back:
        return ""
    last = manifest.ways_back[-1]
    return f"{last.request[:64]} {last.generation}-{last.step} {last.new_generation}"


def choose_milestones(headers: Iterable[EntryHeader]) -> dict[tuple[int, int], tuple[Milestone, ...]]:
    """Return the milestones that count, by version: as `milestone.choose_kept` says of each history.

    The best of a history that was left, as after a loss spike, must not outdo that of the next one.
    """
    by_history: dict[str, list[EntryHeader]] = {}
    for header in headers:
        by_history.setdefault(header.history, []).append(header)
    counting = {}
    for same in by_history.values():
        kept = milestone.choose_kept(
            (header.version, label) for header in same for label in header.milestones
        )
        for header in same:
            labels = tuple(label for label in header.milestones if (header.version, label) in kept)
            if labels:
                counting[header.version] = labels
    return counting


def choose_pruned(headers: Iterable[tuple[int, EntryHeader]], keep: int) -> list[int]:
    """Return the numbers to delete: all but milestones and the newest ``keep`` of the others, at least 1.

    Checkpoints are ordered by (generation, step): a late entry of an older generation has a greater number.
    Of the entries of one checkpoint the newest counts. The greatest number stays: the next one follows it.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: the newest checkpoint must stay, since its number leads to the next")
    entries = sorted(headers)
    current = {header.parts: (number, header) for number, header in entries}.values()
    counting = choose_milestones(header for _, header in current)
    milestones = {number for number, header in current if header.version in counting}
    ordinary = sorted((header.moment, number) for number, header in current if number not in milestones)
    newest = {number for _, number in ordinary[max(0, len(ordinary) - keep) :]}
    kept = milestones | newest | {number for number, _ in entries[-1:]}
    return [number for number, _ in entries if number not in kept]


def _make_header(milestones: dict[str, float | None], newest: Any, **fields: Any) -> EntryHeader:
    labels = tuple(Milestone(name, metric) for name, metric in milestones.items())
    return EntryHeader(
        **fields, newest=tuple(newest) if isinstance(newest, list) else newest, milestones=labels
    )


def _find_invalid_field(header: EntryHeader) -> str | None:
    for name, attempt in (("attempt", header.attempt), ("parts", header.parts)):
        if not isinstance(attempt, str) or parse_attempt_id(attempt) is None:
            return f"{name} is {attempt!r:.80}, not an id."
    if parse_attempt_id(header.parts) != header.version:
        return f"parts is {header.parts!r:.80}, of another step than the attempt."
    if type(header.part_bytes) is not int or not 0 < header.part_bytes < 1 << 53:
        return f"part_bytes is {header.part_bytes!r:.80}, not a size."
    if not _is_count(header.epoch):
        return f"epoch is {header.epoch!r:.80}, not a number."
    newest = header.newest
    if newest is not None and not (
        isinstance(newest, tuple)
        and len(newest) == 3
        and all(map(_is_count, newest))
        and newest >= header.moment
    ):
        return f"newest is {newest!r:.80}, not that of a log with this entry."
    for label in header.milestones:
        if not milestone.is_name(label.name):
            return f"a milestone is {label.name!r:.80}, not a name."
        if label.metric is not None and (
            type(label.metric) not in {int, float} or not math.isfinite(label.metric)
        ):
            return f"a metric is {label.metric!r:.80}, not a finite number."
    if not isinstance(header.history, str) or len(header.history) > MAX_HISTORY_CHARS:
        return f"history is {header.history!r:.80}, not a request and a step."
    if len(header.milestones) > MAX_MILESTONES:
        return f"it has more than {MAX_MILESTONES} milestones."
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53
