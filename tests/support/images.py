"""An image of a live state, as one block of memory."""

from __future__ import annotations

from elastic_resume.capture import schedule
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.state.state_dict import FlatState
from elastic_resume.state.tensor_buffer import Image


def capture(flat: FlatState) -> Image:
    """Copy every tensor of ``flat`` into one image."""
    layout: Layout = schedule.layout_of(flat)
    memory = bytearray().join(bytes(piece) for piece in schedule.image_of(flat, layout))
    return Image(layout, memoryview(memory))
