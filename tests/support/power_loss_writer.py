"""Lives of a process that does all that a node does to its disk; `tests/system/disk/test_power_loss.py` cuts the power of it.

``python -m tests.support.power_loss_writer`` reads what a life is to be from its input, a line of JSON each, forks it, and
passes on what the life tells once it has returned from a promise: that is what must be there afterwards.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from elastic_resume import constants, failpoints
from elastic_resume.checkpoint import node_dir
from elastic_resume.checkpoint.atomic_io import Disk
from elastic_resume.checkpoint.catalog import MIN_KEEP, Catalog
from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.checkpoint.reader import allocate_memory, checkpoint_name
from elastic_resume.errors import MachineError
from elastic_resume.rendezvous.core.events import PersistentState
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from tests.support.checkpoint_samples import RUN, make_manifest, save_image

NODE = "n0"
COMMITS = 5  # of a life whose power nobody cuts before
LARGE, SMALL = 60_000, 100  # numbers of a tensor: past the page cache by pieces, and all of it in the cache


class DyingDisk(Disk):
    """The store's own disk, whose process dies before its n-th operation, or which leaves a sync out."""

    def __init__(self, operations: int = 0, skipped_sync: str = "") -> None:
        """Live for so many operations, 0 for ever; ``without`` is what is not synced."""
        self._operations_left = operations
        self._skipped_sync = skipped_sync

    def __getattribute__(self, name: str) -> Any:
        """Count what is about to be done."""
        found = super().__getattribute__(name)
        if not name.startswith("_") and self._operations_left:
            self._operations_left -= 1
            if self._operations_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return found

    def sync_file(self, descriptor: int, path: Path) -> None:
        """As the store's own, but for what is left out."""
        kinds = {constants.STATE_FILE: "data", constants.MANIFEST_FILE: "manifest"}
        if self._skipped_sync != kinds.get(path.name, "record"):
            super().sync_file(descriptor, path)

    def sync_dir(self, path: Path) -> None:
        """As the store's own, but for what is left out."""
        kind = "directory" if path.name.startswith(constants.TEMPORARY_PREFIX) else "parent"
        if self._skipped_sync != kind:
            super().sync_dir(path)


def make_image(step: int) -> memoryview:
    """The state at a step: what it holds follows from the step."""
    layout = Layout.build([TensorSpec("weight", "F32", (SMALL if step % 2 else LARGE,))])
    memory = allocate_memory(layout.total_bytes)
    memory[: len(layout.header)] = layout.header
    memory[len(layout.header) :] = Random(step).randbytes(layout.total_bytes - len(layout.header))
    return memory


def make_memory(generation: int) -> PersistentState:
    """What the rendezvous would have written."""
    return PersistentState(Incarnation(NODE, "1", "a:1", 0), QuorumState(1), generation)


def report(*words: object) -> None:
    """Say that this is so, whatever happens to the power from this moment on."""
    os.write(1, (json.dumps([time.monotonic(), *words]) + "\n").encode())


def run_life(request: dict[str, Any]) -> None:
    """Claim the node's directory, and commit until the power goes."""
    disk = DyingDisk(request.get("operations", 0), request.get("without", ""))
    with NodeDir.claim(Path(request["path"]), RUN, NODE, disk=disk) as node:
        catalog = Catalog(node.path, RUN, disk)
        catalog.remove_unfinished()
        generation = node.persist_generation(node.read_generation() + 1)
        report("generation", generation)
        node_dir.record_job_start(node.path, "launcher_id", generation - 1, disk)
        report("life", generation - 1)
        DurableStateFile(node.path, disk).write(make_memory(generation))
        report("record", generation)
        bad = node.path / checkpoint_name(0, generation)
        bad.mkdir(exist_ok=True)
        report("quarantine", catalog.quarantine(bad, "found bad").name)
        for step in itertools.islice(itertools.count(request["step"]), COMMITS):
            whole = make_manifest(generation, step)
            save_image(node.path, replace(whole, state={"step": step}), make_image(step), disk)
            report("commit", generation, step)
            if request.get("once"):
                return
            node_dir.record_committed_generation(node.path, generation, disk)
            catalog.prune(MIN_KEEP)


def main() -> None:
    """One life for each line; when it is over, however it ended, an empty line follows what it told."""
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            print(flush=True)
            continue
        os.environ[constants.ENV_FAILPOINTS] = asked.get("failpoints", "")
        failpoints.arm()
        try:
            report("life-of", os.getpid())
            run_life(asked)
        except MachineError:
            os._exit(1)  # it has met the end of the disk
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
