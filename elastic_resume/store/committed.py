"""That a node has committed checkpoints of this job, known also when none is left.

A node without checkpoints is new, or has lost its disk, or somebody removed them; only the last is no reason
to start from nothing in silence. The note lies beside the checkpoints and goes with the disk, so it is there
in that case alone.

Promise: a node with a note has committed a checkpoint of that generation; a crash may leave it without one.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from elastic_resume.errors import MachineError
from elastic_resume.store.durable import DISK, Disk

COMMITTED_FILE = "committed.json"


def note(node_dir: Path, generation: int, disk: Disk = DISK) -> None:
    """Record, after its commit, that a checkpoint of ``generation`` exists. Writes once for a generation.

    A disk that refuses is not told: the checkpoint is there, and the next commit tries again.
    """
    if newest(node_dir) >= generation:
        return
    with contextlib.suppress(MachineError):
        disk.write_atomic(node_dir / COMMITTED_FILE, json.dumps({"generation": generation}).encode())


def newest(node_dir: Path) -> int:
    """The newest generation of which this node has committed a checkpoint; 0 when none is known."""
    try:
        with open(node_dir / COMMITTED_FILE, "rb") as file:
            generation = json.loads(file.read(4096))["generation"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0  # a safety net: what cannot be read stops nobody
    return generation if type(generation) is int and 0 <= generation <= 1 << 53 else 0
