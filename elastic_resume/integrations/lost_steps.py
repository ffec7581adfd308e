"""Set aside what a library wrote in steps that are repeated, until it is written again.

The library or the script would find such files: it would count them, refuse to overwrite them, or give the
next ones other names. A journal in ``base`` has the order in which each file or folder was first written:
twice the number of the step, or one more for the end of the epoch after that step.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from elastic_resume.checkpoint.atomic_io import translate_os_errors

JOURNAL = ".elastic_resume.json"
LOST_STEPS = "lost-steps"
"""Directory for what steps have written that are repeated."""


def note(base: Path, name: str, order: int) -> None:
    """Note before it is written that ``name`` in ``base`` belongs to ``order``, unless it exists already."""
    noted = _read_journal(base)
    if name not in noted or not (base / name).exists():
        base.mkdir(parents=True, exist_ok=True)
        _write_journal(base, {**noted, name: order})


def set_newer_aside(base: Path, order: int) -> None:
    """Move what was first written after ``order`` into `LOST_STEPS`. Several nodes may do so at once."""
    noted = _read_journal(base)
    newer = {name for name, written_at in noted.items() if written_at > order}
    for name in newer:
        aside = base / LOST_STEPS / name
        aside.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the library has removed it, or never wrote it
            try:
                (base / name).replace(aside)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
                shutil.rmtree(aside)  # of an earlier loss of this step
                (base / name).replace(aside)
    if newer:
        _write_journal(base, {name: at for name, at in noted.items() if name not in newer})


def forget(base: Path) -> None:
    """Forget what a former job wrote in ``base``. It stays where it is."""
    if _read_journal(base):
        _write_journal(base, {})


def drop_replaced(base: Path, name: str) -> None:
    """Remove from `LOST_STEPS` what ``name``, which was written just now, replaces."""
    aside = base / LOST_STEPS / name
    with contextlib.suppress(OSError):
        if aside.is_dir():
            shutil.rmtree(aside)
        else:
            aside.unlink(missing_ok=True)
        for directory in (aside.parent, base / LOST_STEPS):
            directory.rmdir()  # an error unless it is empty


def _read_journal(base: Path) -> dict[str, int]:
    try:
        noted = json.loads((base / JOURNAL).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(noted, dict):
        return {}
    return {name: at for name, at in noted.items() if _is_below(name) and type(at) is int}


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _write_journal(base: Path, noted: Mapping[str, int]) -> None:
    journal = base / JOURNAL
    temporary = journal.with_suffix(f".{uuid.uuid4().hex}.tmp")  # nodes may write the same at once
    with translate_os_errors("write", journal):
        temporary.write_text(json.dumps(noted))
        temporary.replace(journal)
