"""An image of a live state, as one block of memory."""

from __future__ import annotations

from elastic_resume.capture import schedule
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.state.state_dict import FlatState
from elastic_resume.state.tensor_buffer import TensorBuffer


def copy_to_image(flat_state: FlatState) -> TensorBuffer:
    """Copy every tensor of ``flat`` into one image."""
    layout: Layout = schedule.build_layout(flat_state)
    memory = bytearray().join(bytes(piece) for piece in schedule.iter_state_chunks(flat_state, layout))
    return TensorBuffer(layout, memoryview(memory))
