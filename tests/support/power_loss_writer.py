"""Run a process that performs all disk operations of a node, for `test_power_loss.py` to cut its power.

``python -m tests.support.power_loss_writer`` reads one JSON request per line and forks a child for each life.
It prints one line whenever an operation has returned: this must hold after a power loss.
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
from elastic_resume.rendezvous.core.world import NO_VIEW, Ballot, Incarnation, PersistentState
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from tests.support.checkpoint_samples import RUN, make_manifest, save_image

NODE = "n0"
COMMITS = 5  # per life that no cut ends earlier
LARGE, SMALL = 60_000, 100  # tensor sizes: partly written past the page cache, and wholly in it


class DyingDisk(Disk):
    """A `Disk` whose process dies before its n-th operation, or which skips one kind of sync."""

    def __init__(self, operations: int = 0, skipped_sync: str = "") -> None:
        """Die before operation number ``operations``, 0 for never; skip syncs of kind ``skipped_sync``."""
        self._operations_left = operations
        self._skipped_sync = skipped_sync

    def __getattribute__(self, name: str) -> Any:
        """Count each operation that is about to run."""
        found = super().__getattribute__(name)
        if not name.startswith("_") and self._operations_left:
            self._operations_left -= 1
            if self._operations_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return found

    def sync_file(self, descriptor: int, path: Path) -> None:
        """Sync, unless this kind is skipped."""
        kinds = {constants.STATE_FILE: "data", constants.MANIFEST_FILE: "manifest"}
        if self._skipped_sync != kinds.get(path.name, "record"):
            super().sync_file(descriptor, path)

    def sync_dir(self, path: Path) -> None:
        """Sync, unless this kind is skipped."""
        kind = "directory" if path.name.startswith(constants.TEMPORARY_PREFIX) else "parent"
        if self._skipped_sync != kind:
            super().sync_dir(path)


def make_image(step: int) -> memoryview:
    """Return an image whose bytes follow from the step."""
    layout = Layout.build([TensorSpec("weight", "F32", (SMALL if step % 2 else LARGE,))])
    memory = allocate_memory(layout.total_bytes)
    memory[: len(layout.header)] = layout.header
    memory[len(layout.header) :] = Random(step).randbytes(layout.total_bytes - len(layout.header))
    return memory


def make_memory(generation: int) -> PersistentState:
    """Return a state of the rendezvous."""
    incarnation = Incarnation(NODE, "1", 1, "a:1", 0)
    return PersistentState(incarnation, NO_VIEW, Ballot(), None, generation)


def report(*words: object) -> None:
    """Report that an operation is durable from now on."""
    os.write(1, (json.dumps([time.monotonic(), *words]) + "\n").encode())


def run_life(request: dict[str, Any]) -> None:
    """Claim the node's directory and commit until the power is lost."""
    disk = DyingDisk(request.get("operations", 0), request.get("without", ""))
    with NodeDir.claim(Path(request["path"]), RUN, NODE, disk=disk) as node:
        catalog = Catalog(node.path, RUN, disk)
        catalog.remove_unfinished()
        generation = node.persist_generation(node.read_generation() + 1)
        report("generation", generation)
        DurableStateFile(node.path, disk).write(make_memory(generation))
        report("record", generation)
        bad = node.path / checkpoint_name(0, generation)
        bad.mkdir(exist_ok=True)
        report("quarantine", catalog.quarantine(bad, "found bad").name)
        for step in itertools.islice(itertools.count(request["step"]), COMMITS):
            manifest = make_manifest(generation, step)
            save_image(node.path, replace(manifest, state={"step": step}), make_image(step), disk)
            report("commit", generation, step)
            if request.get("once"):
                return
            node_dir.record_committed_generation(node.path, generation, disk)
            catalog.prune(MIN_KEEP)


def main() -> None:
    """Run one life per line, and print an empty line when it has ended."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            print(flush=True)
            continue
        os.environ[constants.ENV_FAILPOINTS] = request.get("failpoints", "")
        failpoints.arm()
        try:
            report("life-of", os.getpid())
            run_life(request)
        except MachineError:
            os._exit(1)  # the power was cut
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
