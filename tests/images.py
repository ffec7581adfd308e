"""An image of a live state, as one block of memory."""

from __future__ import annotations

from elastic_resume.store.layout import Layout
from elastic_resume.worker import streaming
from elastic_resume.worker.image import Image
from elastic_resume.worker.state import FlatState


def capture(flat: FlatState) -> Image:
    """Copy every tensor of ``flat`` into one image."""
    layout: Layout = streaming.layout_of(flat)
    memory = bytearray().join(bytes(piece) for piece in streaming.image_of(flat, layout))
    return Image(layout, memoryview(memory))
