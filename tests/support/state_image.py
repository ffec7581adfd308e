"""Images and checkpoints of live state, for tests of state/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic_resume.capture import direct_write
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import FlatState, TensorBuffer
from tests.support import checkpoint_samples


def copy_to_image(flat_state: FlatState) -> TensorBuffer:
    """Copy every tensor of ``flat_state`` into one image."""
    layout: Layout = direct_write.build_layout(flat_state)
    memory = bytearray().join(bytes(piece) for piece in direct_write.iter_state_chunks(flat_state, layout))
    return TensorBuffer(layout, memoryview(memory))


def save_checkpoint(node_dir: Path, step: int, **tracked: Any) -> Path:
    """Commit a checkpoint of the objects ``tracked``."""
    flat_state = state_dict.flatten(tracked)
    position = Position(epoch=0, step_in_epoch=step, step=step, samples=step)
    manifest = Manifest("job", "n0", 0, 1, 1, position, 1.0, "test", flat_state.structure)
    node_dir.mkdir(parents=True, exist_ok=True)
    return checkpoint_samples.save_image(node_dir, manifest, copy_to_image(flat_state).memory)


def make_small_model() -> nn.Sequential:
    """Make a model of two layers, a buffer, tied weights and a complex number."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model.register_buffer("z", torch.tensor([1 + 2j]))
    return model


def train_small_model() -> tuple[nn.Sequential, torch.optim.Adam]:
    """Return a small model and its optimizer after one step."""
    model = make_small_model()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def are_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether names, dtypes and bits of two state_dicts agree."""
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a
    )


class Box:
    """An object with state_dict and load_state_dict."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the value."""
        self.value = state["value"]
