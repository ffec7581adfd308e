"""Define the manifest of a checkpoint: its origin, step, non-tensor state, and a digest of each block.

The manifest is written last and read first. It is one JSON object. Its last member is the xxh3-128 digest of
all bytes before it, so a torn or corrupted manifest is detected without other files. The image is digested in
blocks of `BLOCK_BYTES`: readers verify while they read, and locate an error to within one block.

`Manifest.parse` recognises a newer format even if it understands no other field. Beyond the digest it checks
what readers index with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import xxhash

from elastic_resume.checkpoint.json_codec import reject_constant
from elastic_resume.errors import CorruptError, ForeignError, NewerFormatError, TornError
from elastic_resume.milestone import MAX_WAYS_BACK, WayBack

FORMAT_VERSION = 3  # formats 1 and 2 are read as they are
FORMAT_WITHOUT_REQUEST = 2  # written for a history without --resume-from; format 1 had no sharded tensors
BLOCK_BYTES = 16 << 20  # large enough for full disk speed, small enough for a reusable buffer
MAX_MANIFEST_BYTES = 256 << 20  # non-tensor state is usually kilobytes
_MAX_COUNT = 1 << 53
_COUNT_FIELDS = ("rank", "world_size", "generation", "file_bytes", "block_bytes")
_KIND = "elastic_resume checkpoint"
_MANIFEST_PREFIX = f'{{"kind":"{_KIND}"'.encode()
_DIGEST_SUFFIX = re.compile(rb',"digest":"([0-9a-f]{32})"}\n\Z')


@dataclass(frozen=True)
class Position:
    """The position of training after a finished step."""

    epoch: int
    step_in_epoch: int
    step: int
    samples: int


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint except its tensors.

    ``rank`` is the writer's; ``written_at`` is in Unix seconds. ``rank0_tensors`` names tensors that may
    differ between ranks, such as those of a script's objects: a resume takes rank 0's. ``ways_back`` has
    each way back (``--resume-from``) of its history, the newest last.
    `CheckpointTransaction` fills in ``file_bytes``, ``block_bytes`` and ``blocks``.
    """

    run_id: str
    node: str
    rank: int
    world_size: int
    generation: int
    position: Position
    written_at: float
    writer: str
    state: Any
    rank0_tensors: tuple[str, ...] = ()
    file_bytes: int = 0
    block_bytes: int = BLOCK_BYTES
    blocks: tuple[str, ...] = ()
    ways_back: tuple[WayBack, ...] = ()

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.position.step

    @property
    def version(self) -> tuple[int, int]:
        """(generation, step), by which checkpoints are ordered."""
        return (self.generation, self.position.step)

    @property
    def epoch_position(self) -> tuple[int, int]:
        """(epoch, step in epoch): of two checkpoints of one step, the greater is the later one."""
        return (self.position.epoch, self.position.step_in_epoch)

    @property
    def content_digest(self) -> str:
        """The digest of image and state; equal on two nodes whose checkpoints are equal."""
        digest = xxhash.xxh3_128(f"{self.file_bytes}/{self.block_bytes}/".encode())
        digest.update("".join(self.blocks).encode())
        digest.update(_encode_json(self.state))
        return digest.hexdigest()

    def to_bytes(self) -> bytes:
        """Encode the manifest file; raise ValueError if a field is out of range or not JSON."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["position"] = vars(self.position)
        record["ways_back"] = encode_ways_back(self.ways_back)
        number = FORMAT_VERSION
        if not self.ways_back:  # older versions read it
            number = FORMAT_WITHOUT_REQUEST
            del record["ways_back"]
        invalid = _find_invalid_field(self)
        if invalid:
            raise ValueError(f"manifest: {invalid}")
        body = _encode_json({"kind": _KIND, "format": number, **record})[:-1]
        data = body + f',"digest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()
        if len(data) > MAX_MANIFEST_BYTES:
            raise ValueError(
                f"manifest: {len(data)} bytes of non-tensor state; the limit is {MAX_MANIFEST_BYTES}."
            )
        return data

    @staticmethod
    def parse(data: bytes) -> Manifest:
        """Parse a manifest file.

        Raises:
            TornError: it is empty or cut off.
            CorruptError: digest, types or ranges are wrong.
            NewerFormatError: a later version of elastic_resume wrote it.
            ForeignError: it is JSON, but not a manifest.

        """
        record = _decode_verified(data)
        try:
            position = record.pop("position")
            for name in ("rank0_tensors", "blocks"):
                record[name] = tuple(record[name])
            record["ways_back"] = parse_ways_back(record.get("ways_back", ()))
            manifest = Manifest(position=Position(**position), **record)
        except (KeyError, TypeError) as error:
            raise CorruptError(f"manifest: a field is missing or unknown ({error}).") from error
        invalid = _find_invalid_field(manifest)
        if invalid:
            raise CorruptError(f"manifest: {invalid}")
        return manifest


def encode_ways_back(ways_back: Iterable[WayBack]) -> list[dict[str, Any]]:
    """Return ways back as JSON has them."""
    return [vars(way) for way in ways_back]


def parse_ways_back(record: Any) -> tuple[WayBack, ...]:
    """Return the ways back that `encode_ways_back` has encoded; raise TypeError if they are none."""
    return tuple(WayBack(**each) for each in record)


def _encode_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _decode_verified(data: bytes) -> dict[str, Any]:
    """Return the manifest's members after checking digest and format, without these two and kind."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptError(f"manifest: {len(data)} bytes, more than the limit of {MAX_MANIFEST_BYTES}.")
    try:
        record = json.loads(data, parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:
        if not data or (data.startswith(_MANIFEST_PREFIX) and not data.endswith(b"}\n")):
            raise TornError(f"manifest: ends after {len(data)} bytes.") from error
        raise CorruptError("manifest: not JSON.") from error
    if not isinstance(record, dict) or record.pop("kind", None) != _KIND:
        if _DIGEST_SUFFIX.search(data) and b'"format":' in data and b'"blocks":' in data:
            raise CorruptError("manifest: its digest does not match its bytes.")
        raise ForeignError("manifest: JSON, but not an elastic_resume manifest.")
    number = record.pop("format", None)
    if type(number) is int and number > FORMAT_VERSION:
        raise NewerFormatError(
            f"manifest: format {number}; this elastic_resume reads up to {FORMAT_VERSION}: "
            "upgrade it to load this."
        )
    end = _DIGEST_SUFFIX.search(data)
    if end is None:
        raise CorruptError("manifest: has no digest at its end.")
    if xxhash.xxh3_128_hexdigest(data[: end.start()]) != end[1].decode():
        raise CorruptError("manifest: its digest does not match its bytes.")
    if type(number) is not int or number < 1:
        raise CorruptError(f"manifest: impossible format {number!r}.")
    record.pop("digest", None)
    return record


def _find_invalid_field(manifest: Manifest) -> str | None:
    """Describe the first field of a wrong type or value: readers count on all of them."""
    for name in ("run_id", "node", "writer"):
        if not isinstance(getattr(manifest, name), str):
            return f"{name} is {getattr(manifest, name)!r:.80}, not a text."
    for name in ("rank0_tensors", "blocks"):
        if not all(isinstance(item, str) for item in getattr(manifest, name)):
            return f"{name} has an item that is not a text."
    written_at = manifest.written_at
    if type(written_at) not in {int, float} or not 0 <= written_at <= _MAX_COUNT:
        return f"written_at is {written_at!r:.80}, not a time."
    counts = {name: getattr(manifest, name) for name in _COUNT_FIELDS}
    counts |= {f"position.{name}": count for name, count in vars(manifest.position).items()}
    if len(manifest.ways_back) > MAX_WAYS_BACK:
        return f"ways_back has {len(manifest.ways_back)} items; the limit is {MAX_WAYS_BACK}."
    for i, way in enumerate(manifest.ways_back):
        members = dict(vars(way))
        request = members.pop("request")
        if not isinstance(request, str) or not request:
            return f"ways_back[{i}].request is {request!r:.80}, not a text."
        counts |= {f"ways_back[{i}].{name}": count for name, count in members.items()}
    for name, count in counts.items():
        if type(count) is not int or not 0 <= count <= _MAX_COUNT:
            return f"{name} is {count!r}, not a count."
    block_count = -(-manifest.file_bytes // max(1, manifest.block_bytes))
    if manifest.block_bytes < 1 or len(manifest.blocks) != block_count:
        return f"{len(manifest.blocks)} digests for {block_count} blocks of {manifest.block_bytes} bytes."
    return None
