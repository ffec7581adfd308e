"""The directory of one node: who owns it, which generation it has seen, and whether there is room.

Promise: two processes never own one node's directory at once (as far as the file system's flock goes);
the generation never goes back, and survives a power cut once `persist_generation` has returned.

Does not know what lies in the directory (`catalog`) nor what a generation is for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

import filelock

from elastic_resume import contract
from elastic_resume.errors import ConfigError, CorruptError, MachineError, NodeTakenError
from elastic_resume.store.durable import DISK, Disk, machine, temporary_name

_MAX_SMALL_FILE_BYTES = 64 * 1024
_MAX_GENERATION = 1 << 53


class NodeDir:
    """``CKPT_DIR/RUN_ID/NODE``. Made by `claim` (the owner) or `attach` (a worker of the owner)."""

    def __init__(self, path: Path, lock: filelock.BaseFileLock | None, disk: Disk) -> None:
        """Use `claim` or `attach`."""
        self.path = path
        self._lock = lock
        self._disk = disk

    @staticmethod
    def claim(ckpt_dir: Path, run_id: str, node: str, timeout_s: float = 2.0, disk: Disk = DISK) -> NodeDir:
        """Make the directory where it is missing and become its owner.

        Raises NodeTakenError, naming the owner, when it has one for ``timeout_s`` more; ConfigError for an
        unsafe name; MachineError when the directory cannot be made.
        """
        path = _path(ckpt_dir, run_id, node)
        disk.make_dirs(path)
        # Not thread-local: whoever shuts the process down may be another thread than the one that claimed.
        lock = filelock.FileLock(path / contract.LOCK_FILE, timeout=timeout_s, thread_local=False)
        with machine("lock", path / contract.LOCK_FILE):
            try:
                lock.acquire()
            except filelock.Timeout:  # an OSError too
                raise NodeTakenError(_taken(path, node)) from None
        node_dir = NodeDir(path, lock, disk)
        try:
            disk.write_atomic(path / contract.LOCK_OWNER_FILE, _owner_note())
        except BaseException:
            node_dir.release()
            raise
        return node_dir

    @staticmethod
    def attach(ckpt_dir: Path, run_id: str, node: str, disk: Disk = DISK) -> NodeDir:
        """The directory for a worker whose agent holds the lock; made where it is missing."""
        path = _path(ckpt_dir, run_id, node)
        disk.make_dirs(path)
        return NodeDir(path, None, disk)

    def release(self) -> None:
        """Give the directory up. Harmless when called twice, or on one that was attached."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def __enter__(self) -> NodeDir:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def generation(self) -> int:
        """The greatest generation persisted here; 0 when none was.

        Raises CorruptError for a file that cannot be read as one: taking that for 0 would unfence the stale.
        """
        path = self.path / contract.GENERATION_FILE
        record = _read_json(path)
        if record is None:
            if path.exists():
                raise CorruptError(_bad_generation(path))
            return 0
        number = record.get("generation")
        if type(number) is not int or not 0 <= number <= _MAX_GENERATION:
            raise CorruptError(_bad_generation(path))
        return number

    def persist_generation(self, generation: int) -> int:
        """Make ``generation`` durable unless a greater one is already; return the greatest."""
        if not 0 <= generation <= _MAX_GENERATION:
            raise ValueError(f"generation {generation} is out of range")
        known = self.generation()
        if generation <= known:
            return known
        data = json.dumps({"generation": generation}) + "\n"
        self._disk.write_atomic(self.path / contract.GENERATION_FILE, data.encode())
        return generation

    def ensure_room(self, bytes_needed: int) -> None:
        """Raise MachineError when a file cannot be made here, or ``bytes_needed`` are not free."""
        probe = self.path / temporary_name("probe")
        try:
            self._disk.write_file(probe, b"room?")
        finally:
            if probe.exists():
                self._disk.unlink(probe)
        with machine("look at", self.path):
            free = shutil.disk_usage(self.path).free
        if free < bytes_needed:
            raise MachineError(
                f"cannot save to {self.path}: {_size(bytes_needed)} are needed and {_size(free)} are free; "
                "free space there, lower --keep, or choose another --ckpt-dir."
            )


def _path(ckpt_dir: Path, run_id: str, node: str) -> Path:
    for what, name in (("run id", run_id), ("node name", node)):
        if not re.fullmatch(contract.SAFE_NAME_PATTERN, name):
            raise ConfigError(
                f"{what} {name!r} cannot be the name of a directory: use at most 128 letters, digits, '.', "
                "'_' and '-', beginning with a letter or digit."
            )
    return ckpt_dir / run_id / node


def _owner_note() -> bytes:
    command = " ".join([Path(sys.executable).name, *sys.argv])
    note = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": command[:4096],
        "since": round(time.time(), 3),
    }
    return (json.dumps(note) + "\n").encode()


def _taken(path: Path, node: str) -> str:
    owner = _read_json(path / contract.LOCK_OWNER_FILE) or {}
    since = owner.get("since")
    known = isinstance(since, (int, float)) and 0 <= since < 1e11
    when = time.strftime(" since %Y-%m-%d %H:%M:%S UTC", time.gmtime(since)) if known else ""
    return (
        f"node name {node!r} is taken: {path} is held by process {owner.get('pid', '?')} on host "
        f"{owner.get('host', '?')}{when} ({owner.get('command', 'command unknown')}). "
        "End that one, or give this one another --node-name."
    )


def _bad_generation(path: Path) -> str:
    return (
        f"{path}: does not hold a generation. If no other process of this job runs, remove the file: "
        "the generation then follows from the checkpoints."
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a small JSON object; None when it is missing or is not one."""
    with contextlib.suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
        record = json.loads(file.read(_MAX_SMALL_FILE_BYTES))
        return record if isinstance(record, dict) else None
    return None


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
