"""Write snapshots and checkpoints, resume from them, and return the result, for tests of restore/.

As a script it does so on a rank of real processes, and prints the result. Its argument is JSON: a list of
cases, which the same processes do in turn. A case has "env", with a dict of variables for each rank, and
"states_by_node": node -> {"memory": [generation, step], "disk": [[generation,
step], ...], "archive": [generation, step], "flip": position of a flipped bit in the checkpoint (0 to 1),
"flip_archived": block with a flipped bit, "slots": false, "fail": failpoints,
"hurt": word of the slot's record that holds the position of a flipped bit, "value": value of all tensors}.
By default the values follow from the step; BatchNorm's buffers follow from the node.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch import nn

from elastic_resume import constants, failpoints
from elastic_resume.archive.archive import open_archive
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.checkpoint.writer import CheckpointTransaction
from elastic_resume.config import Settings
from elastic_resume.errors import ElasticResumeError
from elastic_resume.events import EventLog
from elastic_resume.ranks import rank_context
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore import coordinator as resuming
from elastic_resume.restore.streaming import StreamingBuffer
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.progress_page import ProgressPage
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import REPLICATED
from elastic_resume.training import announce
from tests.support.checkpoint_samples import flip_bits
from tests.support.snapshot_samples import read_newest
from tests.support.state_image import Box, copy_to_image

WIDTH = 300  # of a state of 12 * WIDTH**2 bytes
BLOCK_BYTES = 1 << 16


def objects(value: float, own: float) -> dict[str, Any]:
    """Make a model, its optimizer and its average, filled with ``value``, and buffers with ``own``."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.Adam(model.parameters())
    if value:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    average = Box({name: value.detach().clone() for name, value in model.named_parameters()})
    with torch.no_grad():
        for tensor in (*model.parameters(), *average.value.values()):
            tensor.fill_(value)
        for each in optimizer.state.values():
            each["exp_avg"].fill_(value) if value else None
        model[1].running_mean.fill_(own)  # type: ignore[operator]
    return {"model": model, "optimizer": optimizer, "average": average}


def make(place: RankContext, memory: SlotClient | None, states: dict[str, Any]) -> None:
    """Write the snapshots and checkpoints of this node."""
    rank = place.collectives.rank
    own = 100.0 + rank
    for order in [states["memory"]] if "memory" in states else []:
        manifest, image = _copy(place, order, own, states.get("value", float(order[1])))
        assert memory is not None
        slot = memory.acquire_slot(manifest)
        assert slot is not None
        slot.memory[: len(image)] = image
        memory.finish_fill(slot, manifest, on_disk=True)
        if "hurt" in states:
            slot.memory[slot.record.get(states["hurt"])] ^= 4
    for order in states.get("disk", []):
        manifest, image = _copy(place, order, own, states.get("value", float(order[1])))
        with CheckpointTransaction(place.node_dir, *order, block_bytes=BLOCK_BYTES) as writer:
            writer.write(image)
            path = writer.commit(manifest)
    if "archive" in states:
        archive_state(place, *_copy(place, states["archive"], own, float(states["archive"][1])), states)
    if "flip" in states:
        flip_bits(path / constants.STATE_FILE, int(states["flip"] * len(image)), 1)


def archive_state(place: RankContext, manifest: Manifest, image: memoryview, states: dict[str, Any]) -> None:
    """Archive a state as one part."""
    archive = open_archive(place.settings.archive or "", place.settings.run_id)
    attempt = archive.begin(manifest.version, secrets.token_hex(8))
    assert attempt is not None
    blocks = [image[start : start + BLOCK_BYTES] for start in range(0, len(image), BLOCK_BYTES)]
    stored = bytearray(image)
    if "flip_archived" in states:
        stored[states["flip_archived"] * BLOCK_BYTES] ^= 1
    archive.put_part(attempt.id, 0, memoryview(stored))
    digests = tuple(map(xxhash.xxh3_128_hexdigest, blocks))
    whole = replace(manifest, block_bytes=BLOCK_BYTES, blocks=digests)
    archive.commit(attempt, whole.to_bytes(), len(blocks) * BLOCK_BYTES)


def _copy(place: RankContext, order: list[int], own: float, value: float) -> tuple[Manifest, memoryview]:
    flat = state_dict.flatten(objects(value, own))
    image = copy_to_image(flat).memory
    manifest = Manifest(
        run_id=place.settings.run_id,
        node=place.node,
        rank=place.collectives.rank,
        world_size=place.collectives.size,
        generation=order[0],
        position=Position(0, order[1], order[1], order[1]),
        written_at=1.0,
        writer="test",
        state=flat.structure,
        rank0_tensors=tuple(leaf.name for leaf in flat.leaves if leaf.kind != REPLICATED),
        file_bytes=len(image),
    )
    return manifest, image


def resume(world: Collectives, environ: Mapping[str, str], states_by_node: dict[str, Any]) -> dict[str, Any]:
    """Write this rank's states, resume, and return the result."""
    settings = Settings.for_worker(environ, "resumer.py", run_id="job")
    events = settings.ckpt_dir / "job" / settings.node_name / constants.EVENTS_FILE
    place = RankContext(world, settings, EventLog(events, node=settings.node_name))
    mine = states_by_node.get(place.node, {})
    with contextlib.ExitStack() as cleanup:
        if place.is_local_leader:
            node_dir = NodeDir.claim(settings.ckpt_dir, "job", place.node)
        world.gather(None)
        if not place.is_local_leader:
            node_dir = NodeDir.attach(settings.ckpt_dir, "job", place.node)
        cleanup.callback(node_dir.release)
        memory = connect(place, cleanup, has_slots=mine.get("slots", True))
        if place.is_local_leader:
            make(place, memory, mine)
        world.gather(None)
        failpoints._failpoints_by_name.update(failpoints._parse(mine.get("fail", "")))
        live = objects(0.0, 0.0)
        result = restore(place, node_dir, memory, live) | read_values(live)
        world.gather(None)
        failpoints._failpoints_by_name.clear()
        held = read_newest(memory) if memory is not None else None
        result["held"] = list(held.manifest.version) if held is not None else None
        if memory is not None and held is not None:
            result["commit_requested"] = held.slot.record.get("commit_requested") > 0
            image = StreamingBuffer.from_complete(held.image)
            result["held_buffer"] = float(image.get_tensor("model/1.running_mean").mean())
            if place.is_local_leader:
                memory.commit(held.snapshot_id)
        world.gather(None)
        entries = Catalog(place.node_dir, "job").list_valid(read_data=True) if place.is_local_leader else []
        result["disk"] = [list(entry.version) for entry in entries]
    return result


def connect(place: RankContext, cleanup: contextlib.ExitStack, *, has_slots: bool) -> SlotClient | None:
    """Connect to the node's committer, which its local leader starts; return None if it has no slots."""
    name = rank_context._start_committer(place, cleanup) if place.is_local_leader and has_slots else None
    name = place.collectives.gather(name)[place.local_leader_by_node[place.node]]
    if name is None:
        return None
    memory = SlotClient(name, place.local_rank, is_local_leader=place.is_local_leader)
    cleanup.callback(memory.close)
    return memory


def restore(
    place: RankContext, node_dir: NodeDir, memory: SlotClient | None, live: dict[str, Any]
) -> dict[str, Any]:
    """Restore, and return what is announced, or the error."""
    progress_page = ProgressPage(place.node_dir / constants.PROGRESS_FILE)
    try:
        resumed = resuming.restore(place, node_dir, progress_page, memory, live)
    except ElasticResumeError as error:
        return {"error": str(error)}
    position = Position(0, resumed.plan.step, resumed.plan.step, 0)
    fields = announce.resume_event_fields(resumed, position, place.collectives.size)
    manifest_step = resumed.manifest.step if resumed.manifest is not None else None
    return {**fields, "on_disk": resumed.on_disk, "manifest_step": manifest_step}


def read_values(live: dict[str, Any]) -> dict[str, Any]:
    """Return the values of all tensors, and that of the buffer."""
    model, moments = live["model"], [each["exp_avg"] for each in live["optimizer"].state.values()]
    tensors = [*model.parameters(), *moments, *live["average"].value.values()]
    values = sorted({value for tensor in tensors for value in tensor.detach().unique().tolist()})
    return {"values": values, "buffer": float(model[1].running_mean.mean())}


def main(cases: list[dict[str, Any]]) -> None:
    """Do each case, and print its result as one line."""
    world = Collectives.join()
    before = dict(os.environ)
    for case in cases:
        os.environ.update(case["env"][world.rank])
        print(json.dumps(resume(world, os.environ, case["states_by_node"])), flush=True)
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
