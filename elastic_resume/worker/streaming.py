"""Writes the live state straight to disk, for nodes that have no memory for a copy of it.

Training waits meanwhile. Needs one buffer, whatever the size of the state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from elastic_resume import __version__
from elastic_resume.store.checkpoint import fresh_memory
from elastic_resume.store.layout import Layout
from elastic_resume.store.manifest import Manifest, Position
from elastic_resume.worker.image import memory_of, spec_of
from elastic_resume.worker.place import Place
from elastic_resume.worker.state import REPLICATED, FlatState

BUFFER_BYTES = 16 << 20
_PIECE_ITEMS = 1 << 20  # elements of a tensor that are brought to the host, or made contiguous, at a time


def layout_of(flat: FlatState) -> Layout:
    """Lay the state out as a checkpoint's image."""
    return Layout.build([spec_of(leaf.name, leaf.tensor) for leaf in flat.leaves])


def manifest_of(
    place: Place, flat: FlatState, layout: Layout, generation: int, position: Position
) -> Manifest:
    """Describe the image of ``flat`` as it is now."""
    return Manifest(
        run_id=place.settings.run_id,
        node=place.node,
        rank=place.world.rank,
        world_size=place.world.size,
        generation=generation,
        position=position,
        written_at=time.time(),
        writer=__version__,
        state=flat.skeleton,
        follows_rank0=tuple(leaf.name for leaf in flat.leaves if leaf.kind != REPLICATED),
        file_bytes=layout.total_bytes,
    )


def image_of(flat: FlatState, layout: Layout) -> Iterator[memoryview]:
    """Yield the image of ``flat`` in pieces, in one buffer: each is valid until the next is asked for."""
    buffer = fresh_memory(BUFFER_BYTES)
    used = 0
    for source in _bytes_of(flat, layout):
        rest = source
        while rest:
            piece, rest = rest[: BUFFER_BYTES - used], rest[BUFFER_BYTES - used :]
            buffer[used : used + len(piece)] = piece
            used += len(piece)
            if used == BUFFER_BYTES:
                yield buffer
                used = 0
    if used:
        yield buffer[:used]


def _bytes_of(flat: FlatState, layout: Layout) -> Iterator[memoryview]:
    yield memoryview(layout.header)
    by_name = {leaf.name: leaf.tensor for leaf in flat.leaves}
    for name, extent in layout.extents.items():
        if extent.stop == extent.start:
            continue
        tensor = by_name[name].detach()
        if tensor.is_contiguous() and not tensor.is_cuda:
            yield memory_of(tensor)
            continue
        rows = tensor.reshape(1, -1) if tensor.is_contiguous() or tensor.dim() == 0 else tensor
        for row in rows:
            for piece in (row.reshape(-1) if row.dim() else row.reshape(1)).split(_PIECE_ITEMS):
                here = piece.cpu().contiguous()
                yield memory_of(here)
