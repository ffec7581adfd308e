"""Measure commits to disk by a committer process, beside the disk's limit and other ways to save.

    commits.py DIRECTORY MEGABYTES REPETITIONS

Prints one JSON object. A commit is timed from the request to the answer: digests, data, manifest and fsyncs.
The limit is one file of the same bytes, in aligned writes of 16 MiB past the page cache, and one fsync. The
others write the live state, and their files are fsynced.
"""

# ruff: noqa: D102  what a method does is its name

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from elastic_resume.capture.copy_engine import copy_tensors, make_tensor_views
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.slot_memory import encode_snapshot_id
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import make_spec
from jobs.trained import NODE, RUN, Training, in_turns, large, start_committer, sync, write_raw


class Snapshot:
    """The state in a slot of the committer. Each commit saves another step of it."""

    def __init__(self, training: Training, memory: SlotClient) -> None:
        flat = state_dict.flatten(training.tracked)
        layout = Layout.build([make_spec(leaf.name, leaf.tensor) for leaf in flat.leaves])
        self._memory = memory
        self._flat = flat
        self._bytes = layout.total_bytes
        self._step = 0
        slot = memory.acquire_slot(self._manifest())
        if slot is None:
            raise SystemExit("there is no memory for a slot")
        self._slot = slot
        slot.memory[: len(layout.header)] = layout.header
        targets = make_tensor_views(slot.memory, layout)
        filled = [leaf for leaf in flat.leaves if leaf.tensor.numel()]
        copy_tensors([targets[leaf.name] for leaf in filled], [leaf.tensor for leaf in filled])
        self.image = slot.memory[: layout.total_bytes]

    def _manifest(self) -> Manifest:
        position = Position(0, self._step, self._step, self._step)
        return Manifest(
            RUN, NODE, 0, 1, 1, position, 0.0, "benchmark", self._flat.structure, file_bytes=self._bytes
        )

    def commit(self) -> None:
        self._step += 1
        self._slot.take(encode_snapshot_id(1, self._step))
        self._memory.finish_fill(self._slot, self._manifest(), on_disk=False)
        answer = self._memory.commit(encode_snapshot_id(1, self._step))
        if not answer.get("path"):
            raise SystemExit(f"the committer did not commit: {answer}")


def main() -> None:
    directory, megabytes, repetitions = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    training = large(megabytes)
    training.fill()

    def torch_save() -> None:
        torch.save(training.plain, directory / "state.pt")
        sync(directory / "state.pt")

    def dcp_save() -> None:
        shutil.rmtree(directory / "dcp", ignore_errors=True)
        save(training.plain, checkpoint_id=directory / "dcp", no_dist=True)
        sync(directory / "dcp")

    with start_committer(directory) as environ:
        memory = SlotClient(environ["ELASTIC_RESUME_COMMITTER"], 0, is_local_leader=True)
        memory.send("start_generation", trusted_version=None, keep=2)
        snapshot = Snapshot(training, memory)
        ways = {
            "limit": lambda: write_raw(directory / "raw", snapshot.image),
            "ours": snapshot.commit,
            "torch.save": torch_save,
            "dcp.save": dcp_save,
        }
        times = in_turns(ways, repetitions)
    print(json.dumps({"bytes": len(snapshot.image), "seconds": times}))


if __name__ == "__main__":
    main()
