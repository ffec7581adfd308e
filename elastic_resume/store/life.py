"""Which start of the job a generation belongs to, as far as one node knows.

``--resume never`` and ``--resume PATH`` speak of the moment the job is started: what is older is set
aside, what this start has saved since is not, or a restart after a failure would lose it. So each node
notes, durably, the supervisor (agent, torchrun) under which it last entered a world and the greatest
generation that was known when that supervisor came. A crash between two notes leaves the older one,
which names another supervisor or a lower floor: nothing saved is ever set aside by mistake.
"""

from __future__ import annotations

import json
from pathlib import Path

from elastic_resume.errors import CorruptError
from elastic_resume.store.durable import DISK, Disk

LIFE_FILE = "life.json"


def floor_of(node_dir: Path, supervisor: str, generation: int) -> tuple[int, bool]:
    """Give (floor, whether this supervisor has been in a world before).

    Args:
        node_dir: the node's directory.
        supervisor: names one life of one process, as "pid start-time".
        generation: the greatest generation this node knows now.

    Raises:
        CorruptError: the note exists and cannot be read.

    """
    path = node_dir / LIFE_FILE
    try:
        note = json.loads(path.read_bytes()[:4096])
        named, floor = note["supervisor"], note["floor"]
    except FileNotFoundError:
        return generation, False
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} cannot be read ({error}); remove it to go on.") from error
    if named == supervisor and isinstance(floor, int):
        return floor, True
    return generation, False


def note(node_dir: Path, supervisor: str, floor: int, disk: Disk = DISK) -> None:
    """Record that ``supervisor`` has entered a world above ``floor``."""
    disk.write_atomic(node_dir / LIFE_FILE, json.dumps({"supervisor": supervisor, "floor": floor}).encode())
