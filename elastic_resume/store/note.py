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

_DEPTH = 3  # an object, its param_groups, one group: below that nothing static lies beside what moves


def merge(static: Mapping[str, Any], dynamic: Mapping[str, Any]) -> dict[str, Any]:
    """Put the typed JSON of a state together; what both hold is the dynamic one's.

    Where both hold a plain object (an optimizer: its state, and its groups) they are merged, in the order of
    the static one. So are lists of one length: of a param group the parameters' numbers are static, the
    learning rate is not. Parts of both are shared with the result, and neither is changed.
    """
    return _merge_objects(static, dynamic, _DEPTH)


def _merge_objects(static: Mapping[str, Any], dynamic: Mapping[str, Any], depth: int) -> dict[str, Any]:
    over = {key: _merge(static[key], v, depth) if key in static else v for key, v in dynamic.items()}
    return {**static, **over}


def _merge(static: Any, dynamic: Any, depth: int) -> Any:
    if depth and type(static) is type(dynamic) is dict and TAG not in static and TAG not in dynamic:
        return _merge_objects(static, dynamic, depth - 1)
    if depth and type(static) is type(dynamic) is list and len(static) == len(dynamic):
        return [_merge(s, d, depth - 1) for s, d in zip(static, dynamic, strict=True)]
    return dynamic


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
