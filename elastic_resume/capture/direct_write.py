"""Write the live state to disk while training waits, on a node without memory for snapshots."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elastic_resume import __version__
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.checkpoint.writer import CheckpointWriter, CommitResult, RetentionPolicy
from elastic_resume.console import ByteProgress
from elastic_resume.errors import MachineError
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import REPLICATED, FlatState, make_spec, view_bytes

logger = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 1 << 20  # elements of a tensor that are copied or made contiguous at a time


class DirectWriter:
    """Writes checkpoints from the tracked objects of the local leader; the committer makes all others."""

    def __init__(
        self,
        context: RankContext,
        plan: ResumePlan,
        tracked: Mapping[str, Any],
        retention: RetentionPolicy,
        waiting_for_disk: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._context = context
        self._plan = plan
        self._tracked = tracked
        self._waiting_for_disk = waiting_for_disk
        self._writer = CheckpointWriter(context.node_dir, context.settings.run_id, context.events.emit)
        self._writer.start_generation(retention)

    def write(self, position: Position) -> CommitResult | None:
        """Commit the state as it is now; return None if the disk refuses, which is logged."""
        with self._waiting_for_disk():
            flat_state = state_dict.flatten(self._tracked)
            state_dict.refuse_divided(flat_state.leaves)
            layout = build_layout(flat_state)
            manifest = self._build_manifest(flat_state, layout, position)
            try:
                what = f"writing the checkpoint of step {position.step}"
                with ByteProgress(what, layout.total_bytes) as progress:
                    chunks = progress.track(iter_state_chunks(flat_state, layout))
                    result = self._writer.commit(manifest, chunks)
            except MachineError as error:
                logger.warning(
                    f"node {self._context.node}: step {position.step} was not saved: {error} "
                    "Training continues; older checkpoints are untouched."
                )
                return None
            self._writer.prune()
            return result

    def _build_manifest(self, flat_state: FlatState, layout: Layout, position: Position) -> Manifest:
        context = self._context
        return Manifest(
            run_id=context.settings.run_id,
            node=context.node,
            rank=context.collectives.rank,
            world_size=context.collectives.size,
            generation=self._plan.generation,
            position=position,
            written_at=time.time(),
            writer=__version__,
            state=flat_state.structure,
            rank0_tensors=tuple(leaf.name for leaf in flat_state.leaves if leaf.kind != REPLICATED),
            file_bytes=layout.total_bytes,
            ways_back=self._plan.ways_back,
        )


def build_layout(flat_state: FlatState) -> Layout:
    """Lay out the state as the image of a checkpoint."""
    return Layout.build([make_spec(leaf.name, leaf.tensor) for leaf in flat_state.leaves])


def iter_state_chunks(flat_state: FlatState, layout: Layout) -> Iterator[memoryview]:
    """Yield the image of ``flat_state`` in pieces, each valid until the next one is requested."""
    yield memoryview(layout.header)
    by_name = {leaf.name: leaf.tensor for leaf in flat_state.leaves}
    for name, extent in layout.extents.items():
        if extent.stop == extent.start:
            continue
        tensor = by_name[name].detach()
        if tensor.is_contiguous() and not tensor.is_cuda:
            yield view_bytes(tensor)
            continue
        rows = tensor.reshape(1, -1) if tensor.is_contiguous() or tensor.dim() == 0 else tensor
        for row in rows:
            for piece in (row.reshape(-1) if row.dim() else row.reshape(1)).split(_CHUNK_ELEMENTS):
                on_host = piece.cpu().contiguous()  # the view does not keep it alive
                yield view_bytes(on_host)
