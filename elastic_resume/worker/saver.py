"""Writes this node's checkpoints from a thread of the worker that leads the node.

The training thread pays for one copy of the state into memory that is kept and reused; the disk is
waited for elsewhere. A disk that fails costs checkpoints, never training: the failure is told at once,
older copies stay whole, and the next save tries again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from elastic_resume import __version__, failpoints
from elastic_resume.errors import ElasticResumeError
from elastic_resume.policy.source import ResumePlan
from elastic_resume.store import checkpoint, committed
from elastic_resume.store.layout import Layout
from elastic_resume.store.manifest import BLOCK_BYTES, Manifest, Position
from elastic_resume.worker import state
from elastic_resume.worker.image import Image, spec_of
from elastic_resume.worker.place import Place
from elastic_resume.worker.state import REPLICATED, FlatState


class Saver:
    """Copies the state at a step boundary and commits it behind the training thread's back."""

    def __init__(self, place: Place, plan: ResumePlan, saved_step: int) -> None:
        """``saved_step`` is the step that this node already holds a checkpoint of (0 when none)."""
        self.saved_step = saved_step  # of the last save taken; falls back when its commit fails
        self.path: Path | None = None  # of the last commit by this process
        self.stall_s: float | None = None
        self._place = place
        self._generation = plan.generation
        self._floor = plan.floor
        # Copies whose every byte this process has read or written: only they may push others out.
        self._trusted = {(plan.source_generation, plan.step)}
        self._before = saved_step
        self._image: Image | None = None
        self._writing: Future[Path | None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-resume-save")
        self._since = time.monotonic()

    @property
    def since_s(self) -> float:
        """Seconds since the last save was taken (or since this generation began)."""
        return time.monotonic() - self._since

    @property
    def idle(self) -> bool:
        """Whether nothing is being written. Raises what went wrong in the thread when it was our own bug."""
        if self._writing is not None and self._writing.done():
            self.wait()
        return self._writing is None

    def take(self, tracked: Mapping[str, Any], position: Position) -> None:
        """Copy the state of ``tracked`` and start to commit it. Call at a step boundary, when `idle`.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        began = time.monotonic()
        flat = state.flatten(tracked)
        self._image = capture(flat, self._image)
        failpoints.hit("save.captured")
        manifest = self._manifest(flat, position, self._image)
        self._writing = self._thread.submit(self._commit, manifest, self._image)
        self._before, self.saved_step = self.saved_step, position.step
        self._since = time.monotonic()
        self.stall_s = self._since - began

    def wait(self) -> None:
        """Wait until nothing is being written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        path = writing.result()
        if path is not None:
            self.path = path
        else:
            self.saved_step = self._before

    def close(self) -> None:
        """Wait for the commit in flight and end the thread."""
        self.wait()
        self._thread.shutdown()

    def _manifest(self, flat: FlatState, position: Position, image: Image) -> Manifest:
        return Manifest(
            run_id=self._place.settings.run_id,
            node=self._place.node,
            rank=self._place.world.rank,
            world_size=self._place.world.size,
            generation=self._generation,
            position=position,
            written_at=time.time(),
            writer=__version__,
            state=flat.skeleton,
            follows_rank0=tuple(leaf.name for leaf in flat.leaves if leaf.kind != REPLICATED),
            file_bytes=image.layout.total_bytes,
            block_bytes=BLOCK_BYTES,
            blocks=(),
        )

    def _commit(self, manifest: Manifest, image: Image) -> Path | None:
        began = time.monotonic()
        where = {"generation": manifest.generation, "step": manifest.step}
        try:
            path = checkpoint.save_image(self._place.node_dir, manifest, image.memory)
        except ElasticResumeError as error:
            self._place.events.write("commit-failed", **where, error=str(error))
            print(
                f"elastic_resume: node {self._place.node}: step {manifest.step} was not saved: {error} "
                "Training goes on; older checkpoints are untouched.",
                file=sys.stderr,
                flush=True,
            )
            return None
        seconds = round(time.monotonic() - began, 4)
        self._trusted.add(manifest.order)
        committed.note(self._place.node_dir, manifest.generation)
        self._place.events.write(
            "commit", **where, bytes=image.layout.total_bytes, seconds=seconds, path=str(path)
        )
        try:
            keep = self._place.settings.keep
            for pruned in self._place.catalog.prune(
                keep, above_generation=self._floor, trusted=self._trusted
            ):
                self._place.events.write("prune", path=str(pruned))
        except ElasticResumeError as error:
            self._place.events.write("prune-failed", error=str(error))
        return path


def capture(flat: FlatState, reuse: Image | None) -> Image:
    """Copy every tensor of ``flat`` into one image; ``reuse`` is overwritten when its layout is the same."""
    specs = [spec_of(leaf.name, leaf.tensor) for leaf in flat.leaves]
    image = reuse if reuse is not None and reuse.layout == Layout.build(specs) else Image.allocate(specs)
    with torch.no_grad():
        for leaf in flat.leaves:
            if leaf.tensor.numel():
                image.tensor(leaf.name).copy_(leaf.tensor)
    return image


def saved_step(plan: ResumePlan, place: Place) -> int:
    """The step that the node's own disk holds: none where a peer's directory or a given path was read."""
    copy = plan.copy_of(place.node)
    elsewhere = copy is not None and copy.home != place.node
    return -1 if plan.kind == "checkpoint" and elsewhere else plan.step
