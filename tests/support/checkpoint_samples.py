"""Write small checkpoints for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from elastic_resume.checkpoint.atomic_io import DISK, Disk
from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.checkpoint.writer import CheckpointTransaction

RUN = "run-1"
SPECS = (
    TensorSpec("model.weight", "F32", (40, 30)),
    TensorSpec("model.bias", "BF16", (33,)),
    TensorSpec("optimizer.step", "I64", ()),
    TensorSpec("model.mask", "BOOL", (7,)),
    TensorSpec("model.empty", "F32", (0, 3)),
)
SMALL_BLOCK = 2048  # several blocks in a small image


def make_image(seed: int = 0) -> memoryview:
    """Return a whole image with reproducible tensor bytes."""
    layout = Layout.build(SPECS)
    return memoryview(layout.header + Random(seed).randbytes(layout.total_bytes - len(layout.header)))


def make_manifest(generation: int = 1, step: int = 1, *, run_id: str = RUN, state: object = None) -> Manifest:
    """Return a manifest whose blocks the writer fills in."""
    return Manifest(
        run_id=run_id,
        node="node-a",
        rank=0,
        world_size=2,
        generation=generation,
        position=Position(epoch=0, step_in_epoch=step, step=step, samples=8 * step),
        written_at=1_700_000_000.5,
        writer="0.1.0",
        state={"step": step} if state is None else state,
        rank0_tensors=("model.bias",),
    )


def save_checkpoint(
    node_dir: Path,
    generation: int = 1,
    step: int = 1,
    *,
    seed: int | None = None,
    disk: Disk = DISK,
    node: str = "node-a",
) -> Path:
    """Commit a small checkpoint of several blocks; its bytes follow from ``seed`` (default: the step)."""
    with CheckpointTransaction(node_dir, generation, step, disk, block_bytes=SMALL_BLOCK) as writer:
        writer.write(make_image(step if seed is None else seed))
        return writer.commit(replace(make_manifest(generation, step), node=node))


def save_image(node_dir: Path, manifest: Manifest, image: memoryview, disk: Disk = DISK) -> Path:
    """Commit a whole image as a job does; return the checkpoint's directory."""
    with CheckpointTransaction(node_dir, *manifest.version, disk) as writer:
        writer.write(image)
        return writer.commit(manifest)


def flip_bits(path: Path, offset: int, mask: int = 0x10) -> None:
    """Flip bits of one byte of a file; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)
