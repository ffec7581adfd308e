"""Quarantine: what failed verification is moved aside, whole, for a human to look at.

Promise: nothing is overwritten, and nothing removed but by `discard`. After a crash the directory stands
under its old name or under ``quarantine/``, never in neither. The reason lies beside it as
``NAME.reason.json``.

Does not know why something was refused: the reason is given.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from elastic_resume import contract
from elastic_resume.store.durable import DISK, Disk, machine, temporary_name

_MAX_TRIES = 100_000


def quarantine(node_dir: Path, path: Path, reason: str, disk: Disk = DISK) -> Path:
    """Move ``path`` to ``node_dir/quarantine/`` under a name not yet used there; return the new path."""
    directory = node_dir / contract.QUARANTINE_DIR
    disk.make_dirs(directory)
    target = _unused(directory, path.name)
    disk.rename(path, target)
    disk.sync_dir(directory)  # first the new name, then the absence of the old one
    disk.sync_dir(path.parent)
    note = {"was": path.name, "reason": reason, "at": round(time.time(), 3)}
    disk.write_atomic(_reason_file(target), (json.dumps(note, indent=1) + "\n").encode())
    return target


def discard(path: Path, disk: Disk = DISK) -> None:
    """Remove what was set aside, and is of no use to anybody any more. Raises MachineError."""
    unfinished = path.parent.parent / temporary_name(path.name)  # what a crash leaves of it is swept
    disk.rename(path, unfinished)
    disk.unlink(_reason_file(path))
    disk.sync_dir(path.parent)
    disk.sync_dir(unfinished.parent)
    disk.remove_tree(unfinished)


def quarantined(node_dir: Path) -> list[Path]:
    """What lies in quarantine, by name, without the notes."""
    directory = node_dir / contract.QUARANTINE_DIR
    with machine("list", directory):
        inside = list(directory.iterdir()) if directory.is_dir() else []
    return sorted(
        path
        for path in inside
        if not path.name.endswith(".reason.json") and not path.name.startswith(contract.TEMPORARY_PREFIX)
    )


def reason_of(path: Path) -> str:
    """Why ``path`` lies in quarantine, as far as its note can be read."""
    try:
        with open(_reason_file(path), "rb") as file:
            note = json.loads(file.read(64 * 1024))
        return str(note["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return "set aside earlier; its note cannot be read"


def _unused(directory: Path, name: str) -> Path:
    # Only the owner of the node's lock moves things here, so looking before the rename is enough.
    for number in range(_MAX_TRIES):
        target = directory / (f"{name}.{number}" if number else name)
        if not os.path.lexists(target) and not os.path.lexists(_reason_file(target)):
            return target
    raise ValueError(f"{directory}: {_MAX_TRIES} copies of {name} in quarantine; remove some.")


def _reason_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.reason.json")
