"""Quarantine: what failed verification is moved aside, whole, for a human to look at.

Promise: nothing is removed or overwritten. After a crash the directory stands under its old name or
under ``quarantine/``, never in neither. The reason lies beside it as ``NAME.reason.json``.

Does not know why something was refused: the reason is given.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from elastic_resume import contract
from elastic_resume.store.durable import DISK, Disk

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


def quarantined(node_dir: Path) -> list[Path]:
    """What lies in quarantine, by name, without the notes."""
    directory = node_dir / contract.QUARANTINE_DIR
    if not directory.is_dir():
        return []
    return sorted(
        path
        for path in directory.iterdir()
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
