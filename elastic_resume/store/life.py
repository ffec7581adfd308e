"""Which start of the job a generation belongs to, as far as one node knows.

``--resume never`` speaks of the moment the job is started: what is older is set aside, what this start
has saved since is not, or a restart after a failure would lose it. So each node notes, durably, the
supervisor (agent, torchrun) under which it last entered a world and the greatest generation that anybody
knew when the job was started. A crash between two notes leaves the older one, which names another
supervisor: nothing saved is ever set aside by mistake. Other modes do not look here.

A second small file holds the arguments with which a script was started last: a person is told what differs.
It is never relied upon. The environment is not in it, nor the values of arguments that hold secrets by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from elastic_resume.errors import MachineError, RecordError
from elastic_resume.store.durable import DISK, Disk, machine

_MAX_BYTES = 4096
LIFE_FILE = "life.json"
_MAX_START_BYTES = 64 * 1024
START_FILE = "start.json"
# --api-key, HF_TOKEN, db.password, apiKey; not --tokenizer, --max-tokens or --keypoints.
_SECRET = re.compile(r"(?i:keys?|token|secrets?|passwords?)(?![a-z])[^=]*(=|\Z)", re.DOTALL)
MASK = "***"


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


def last_start(node_dir: Path) -> tuple[str, list[str]]:
    """Return the supervisor and the script's words of the last start here, empty where they are not known."""
    try:
        with open(node_dir / START_FILE, "rb") as file:
            found = json.loads(file.read(_MAX_START_BYTES))
        supervisor, words = found["supervisor"], found["words"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "", []
    is_valid = isinstance(supervisor, str) and isinstance(words, list)
    return (supervisor, [str(word) for word in words]) if is_valid else ("", [])


def note_start(node_dir: Path, supervisor: str, words: Sequence[str], disk: Disk = DISK) -> None:
    """Record the words with which ``supervisor`` starts the script. A disk that refuses changes nothing."""
    kept = masked(words)
    if last_start(node_dir) == (supervisor, kept):
        return  # a restart, which shall not wait for the disk
    data = json.dumps({"supervisor": supervisor, "words": kept}).encode()
    if len(data) > _MAX_START_BYTES:
        data = json.dumps({"supervisor": supervisor, "words": []}).encode()
    with contextlib.suppress(MachineError):
        disk.write_atomic(node_dir / START_FILE, data)


def masked(words: Sequence[str]) -> list[str]:
    """Replace the values of arguments that are secret by name, as in ``--x=VALUE`` and ``--x VALUE``."""
    found: list[str] = []
    follows = False  # whether the word may be the value of the one before it
    for word in words:
        name = _SECRET.search(word)
        if follows and not word.startswith("-"):
            found.append(MASK)
            follows = False
        elif name is not None and name[1]:
            found.append(word[: name.end()] + MASK)
            follows = False
        else:
            found.append(word)
            follows = name is not None and word.startswith("-")
    return found
