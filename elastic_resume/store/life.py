"""Which start of the job a generation belongs to, as far as one node knows.

``--resume never`` and ``--resume PATH`` speak of the moment the job is started: what is older is set
aside, what this start has saved since is not, or a restart after a failure would lose it. So each node
notes, durably, the supervisor (agent, torchrun) under which it last entered a world and the greatest
generation that anybody knew when the job was started. A crash between two notes leaves the older one,
which names another supervisor: nothing saved is ever set aside by mistake. Other modes do not look here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from elastic_resume.errors import RecordError
from elastic_resume.store.durable import DISK, Disk, machine

_MAX_BYTES = 4096
LIFE_FILE = "life.json"


def floor_of(node_dir: Path, supervisor: str, generation: int) -> tuple[int, bool]:
    """Give (floor, whether this supervisor has been in a world before).

    Args:
        node_dir: the node's directory.
        supervisor: names one life of one process, as "pid start-time".
        generation: the greatest generation this node knows now.

    Raises:
        RecordError: the note exists and is not one.
        MachineError: it cannot be read.

    """
    path = node_dir / LIFE_FILE
    with machine("read", path):
        if not os.path.lexists(path):
            return generation, False
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES)
    try:
        note = json.loads(data)
        named, floor = note["supervisor"], note["floor"]
        if type(named) is not str or type(floor) is not int:
            raise ValueError("supervisor or floor is of a wrong type")  # noqa: TRY301
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(
            f"{path}: is damaged ({type(error).__name__}: {error}), so which checkpoints are older than this "
            "start of the job is not known. Remove the file: all that exist now then count as older."
        ) from error
    return (floor, True) if named == supervisor else (generation, False)


def note(node_dir: Path, supervisor: str, floor: int, disk: Disk = DISK) -> None:
    """Record that ``supervisor`` has entered a world above ``floor``."""
    disk.write_atomic(node_dir / LIFE_FILE, json.dumps({"supervisor": supervisor, "floor": floor}).encode())
