"""What a slot says of its image: two pieces of JSON beside it, which make the manifest of a checkpoint.

``static`` changes with the layout only, so it is written once and not at every step::

    {"run_id", "node", "rank", "world_size", "writer", "follows_rank0": [...], "state": {...}}

``dynamic`` is of this snapshot: ``{"generation", "position": {...}, "written_at", "state": {...}}``. The
two states are merged: see `merge`. Does not know what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elastic_resume.errors import CorruptError
from elastic_resume.store.manifest import MAX_MANIFEST_BYTES, Manifest, Position
from elastic_resume.store.typed import TAG


def merge(static: Mapping[str, Any], dynamic: Mapping[str, Any]) -> dict[str, Any]:
    """Put the typed JSON of a state together; what both hold is the dynamic one's.

    Where both hold a plain object under a name (an optimizer: its state, and its groups) they are merged.
    """
    merged = dict(static)
    for name, part in dynamic.items():
        below = merged.get(name)
        both = isinstance(below, dict) and isinstance(part, dict) and TAG not in below and TAG not in part
        merged[name] = {**below, **part} if both and below is not None else part
    return merged


def to_bytes(part: Mapping[str, Any]) -> bytes:
    """Give one of the two as it lies in the slot."""
    return json.dumps(part, separators=(",", ":"), allow_nan=False).encode()


def moving(
    generation: int, position: Position, written_at: float, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Give the dynamic part."""
    where = {name: getattr(position, name) for name in ("epoch", "step_in_epoch", "step", "samples")}
    return {"generation": generation, "position": where, "written_at": written_at, "state": state}


def manifest_of(static: bytes, dynamic: bytes, image_bytes: int) -> Manifest:
    """Give the manifest of a snapshot; its blocks have no digests yet.

    Raises:
        CorruptError: the two are not what a worker writes.

    """
    if len(static) + len(dynamic) > MAX_MANIFEST_BYTES:
        raise CorruptError(f"snapshot: {len(static) + len(dynamic)} bytes of notes.")
    try:
        fixed, moving = json.loads(static), json.loads(dynamic)
        state = merge(fixed.pop("state"), moving.pop("state"))
        position = Position(**moving.pop("position"))
        follows = tuple(fixed.pop("follows_rank0"))
        return Manifest(
            **fixed, **moving, position=position, follows_rank0=follows, state=state, file_bytes=image_bytes
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"snapshot: its notes are not what a worker writes ({error!r}).") from error
