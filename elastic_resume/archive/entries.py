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

from elastic_resume.checkpoint.json_codec import reject_constant
from elastic_resume.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from elastic_resume.checkpoint.reader import checkpoint_name, parse_checkpoint_name
from elastic_resume.errors import CheckpointError, CorruptError, ForeignError, NewerFormatError, TornError

FORMAT_VERSION = 1
KIND = "elastic_resume archived checkpoint"
MAX_HEADER_BYTES = 4096
MAX_ENTRY_BYTES = MAX_HEADER_BYTES + MAX_MANIFEST_BYTES
MIN_PART_BYTES = 64 << 20
MAX_PART_BYTES = 4 << 30  # a store takes at most 5 GB in one request
MAX_PARTS = 1000  # more than this only if parts would be greater than MAX_PART_BYTES
MAX_NUMBER = 99_999_999
_NUMBER = re.compile(r"[0-9]{8}")
_ATTEMPT = re.compile(r"(g\d{6,16}-s\d{10,16})-[0-9a-f]{8,32}")
_MILESTONE = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Attempt:
    """An attempt to archive the checkpoint ``version``: its number in the log, fixed, and its unique id."""

    number: int
    id: str
    version: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """Return it as data for `json.dumps`."""
        return asdict(self)

    @staticmethod
    def from_json(record: Any) -> Attempt:
        """Return the attempt that `to_json` was called for; raise ValueError for anything else."""
        if not isinstance(record, dict) or set(record) != {"number", "id", "version"}:
            raise ValueError(f"not an attempt: {record!r:.100}")
        number, name = record["number"], record["id"]
        if type(number) is not int or not 0 < number <= MAX_NUMBER or not isinstance(name, str):
            raise ValueError(f"not an attempt: {record!r:.100}")
        version = parse_attempt_id(name)
        if version is None or record["version"] not in ([*version], version):
            raise ValueError(f"not an attempt: {record!r:.100}")
        return Attempt(number, name, version)


@dataclass(frozen=True)
class EntryHeader:
    """What an entry says beside the manifest. ``metric``: the greatest is the best of a milestone's name."""

    attempt: str
    part_bytes: int
    milestone: str | None = None
    metric: float | None = None


@dataclass(frozen=True)
class ArchivedCheckpoint:
    """An entry of the log: the checkpoint's manifest, and where the bytes of its image are."""

    number: int
    attempt: str
    part_bytes: int
    milestone: str | None
    metric: float | None
    manifest: Manifest

    @property
    def version(self) -> tuple[int, int]:
        """(generation, step), by which checkpoints are ordered."""
        return self.manifest.version


@dataclass(frozen=True)
class BadEntry:
    """An entry of the log that cannot be read, and why; and the version of its attempt, if it is known."""

    number: int
    error: CheckpointError
    version: tuple[int, int] | None = None


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


def find_version(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return (generation, step) of an entry of any format; None if it cannot be found."""
    match = re.search(rb'"attempt":\s*"([gs0-9-]{1,64}[0-9a-f-]{1,64})"', bytes(data[:MAX_HEADER_BYTES]))
    return parse_attempt_id(match[1].decode()) if match else None


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


def encode_header(header: EntryHeader) -> bytes:
    """Encode the first line of an entry; raise ValueError if a field is out of range."""
    record = {"kind": KIND, "format": FORMAT_VERSION, **asdict(header)}
    invalid = _find_invalid_field(header)
    if invalid:
        raise ValueError(invalid)
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def parse_header(data: bytes | memoryview) -> tuple[EntryHeader, int]:
    """Return the first line of an entry, and its number of bytes; ``data`` may end after it.

    Raises:
        TornError: the line does not end.
        CorruptError: it is not JSON, or a field is wrong.
        ForeignError: it is not an entry of an archive.
        NewerFormatError: a later version of elastic_resume wrote it.

    """
    line, newline, _ = bytes(data[:MAX_HEADER_BYTES]).partition(b"\n")
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
        header = EntryHeader(**record)
    except TypeError as error:
        raise CorruptError(f"entry: a field is missing or unknown ({error}).") from error
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
    if header.part_bytes % manifest.block_bytes:
        raise CorruptError(
            f"entry: parts of {header.part_bytes} bytes are no whole blocks of {manifest.block_bytes}."
        )
    if run_id is not None and manifest.run_id != run_id:
        raise ForeignError(f"belongs to the run {manifest.run_id!r}, not to {run_id!r}.")
    return ArchivedCheckpoint(
        number, header.attempt, header.part_bytes, header.milestone, header.metric, manifest
    )


def choose_pruned(headers: Iterable[tuple[int, EntryHeader]], keep: int) -> list[int]:
    """Return the numbers to delete: all but milestones and the newest ``keep`` of the others, at least 1.

    Every milestone without a metric stays; of those of one name with a metric, the best stays, and of equal
    ones the newest. So the greatest number always stays.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: the newest checkpoint must stay, since its number leads to the next")
    entries = sorted(headers)
    best: dict[str, tuple[float, int]] = {}
    milestones = set()
    for number, header in entries:
        if header.milestone is not None and header.metric is None:
            milestones.add(number)
        elif header.milestone is not None and header.metric is not None:
            best[header.milestone] = max(best.get(header.milestone, (-math.inf, 0)), (header.metric, number))
    milestones |= {number for _, number in best.values()}
    ordinary = [number for number, _ in entries if number not in milestones]
    kept = milestones | set(ordinary[max(0, len(ordinary) - keep) :])
    return [number for number, _ in entries if number not in kept]


def _find_invalid_field(header: EntryHeader) -> str | None:
    if not isinstance(header.attempt, str) or parse_attempt_id(header.attempt) is None:
        return f"attempt is {header.attempt!r:.80}, not an id."
    if type(header.part_bytes) is not int or not 0 < header.part_bytes < 1 << 53:
        return f"part_bytes is {header.part_bytes!r:.80}, not a size."
    milestone, metric = header.milestone, header.metric
    if milestone is not None and not (isinstance(milestone, str) and _MILESTONE.fullmatch(milestone)):
        return f"milestone is {milestone!r:.80}, not a name."
    if metric is not None and (type(metric) not in {int, float} or not math.isfinite(metric)):
        return f"metric is {metric!r:.80}, not a finite number."
    return None
