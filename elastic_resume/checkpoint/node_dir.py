"""The directory of one node: who owns it, which one it is, which generation it has seen, is there room.

Promise: two processes never own one node's directory at once (as far as the file system's flock goes);
the generation never goes back, and survives a power cut once `persist_generation` has returned; the
identity never changes. A fork of the owner, which shares its flock, cannot give the directory up.

Does not know what lies in the directory (`catalog`) nor what a generation is for.

Which start of the job a generation belongs to, as far as one node knows.

``--resume never`` speaks of the moment the job is started: what is older is set aside, what this start
has saved since is not, or a restart after a failure would lose it. So each node notes, durably, the
supervisor (agent, torchrun) under which it last entered a world and the greatest generation that anybody
knew when the job was started. A crash between two notes leaves the older one, which names another
supervisor: nothing saved is ever set aside by mistake. Other modes do not look here.

A second small file holds the arguments with which a script was started last: a person is told what differs.
It is never relied upon. The environment is not in it, nor the values of arguments that hold secrets by name.

That a node has committed checkpoints of this job, known also when none is left.

A node without checkpoints is new, or has lost its disk, or somebody removed them; only the last is no reason
to start from nothing in silence. The note lies beside the checkpoints and goes with the disk, so it is there
in that case alone.

Promise: a node with a note has committed a checkpoint of that generation; a crash may leave it without one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import filelock

from elastic_resume import constants
from elastic_resume.checkpoint.atomic_io import DISK, Disk, temporary_name, translate_os_errors
from elastic_resume.errors import ConfigError, MachineError, NodeFileError, NodeLockedError, UsageError
from elastic_resume.schedulers import resources
from elastic_resume.units import format_bytes

_MAX_SMALL_FILE_BYTES = 64 * 1024
_MAX_GENERATION = 1 << 53
_lock_pids: dict[Path, int] = {}  # what is locked -> the process that did it, which a fork is not


class NodeDir:
    """``CKPT_DIR/RUN_ID/NODE``. Made by `claim` (the owner) or `attach` (a worker of the owner)."""

    def __init__(self, path: Path, lock: _Lock | None, disk: Disk) -> None:
        """Use `claim` or `attach`."""
        self.path = path
        self._lock = lock
        self._disk = disk

    @staticmethod
    def claim(ckpt_dir: Path, run_id: str, node: str, timeout_s: float = 2.0, disk: Disk = DISK) -> NodeDir:
        """Make the directory where it is missing and become its owner.

        Raises NodeTakenError, naming the owner, when it has one for ``timeout_s`` more; UsageError when the
        owner is this very process, which would wait for itself; ConfigError for an unsafe name; MachineError
        when the directory cannot be made; RecordError when it does not say which one it is.
        """
        path = _node_path(ckpt_dir, run_id, node)
        if _lock_pids.get(path.resolve()) == os.getpid():
            raise UsageError(
                f"this process has already resumed job {run_id!r} under node name {node!r}; "
                "call run.close() first."
            )
        disk.make_dirs(path)
        lock = _Lock.acquire(path / constants.LOCK_FILE, timeout_s)
        if lock is None:
            raise NodeLockedError(_node_taken_message(path, node))
        node_dir = NodeDir(path, lock, disk)
        try:
            disk.write_atomic(path / constants.LOCK_OWNER_FILE, _encode_lock_owner())
            if not node_dir.read_identity():
                note = json.dumps({"id": secrets.token_hex(16)}) + "\n"
                disk.write_atomic(path / constants.IDENTITY_FILE, note.encode())
        except BaseException:
            node_dir.release()
            raise
        return node_dir

    @staticmethod
    def attach(ckpt_dir: Path, run_id: str, node: str, disk: Disk = DISK) -> NodeDir:
        """The directory for a worker whose agent holds the lock; made where it is missing."""
        path = _node_path(ckpt_dir, run_id, node)
        disk.make_dirs(path)
        return NodeDir(path, None, disk)

    def release(self) -> None:
        """Give the directory up. Harmless when called twice, in a fork, or on one that was attached."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def __enter__(self) -> NodeDir:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def read_identity(self) -> str:
        """Name this directory, whatever its path: 32 hexadecimal digits that its first owner wrote.

        Empty where nobody has owned it yet. So two hosts that call themselves alike and do not share a disk
        are told apart: their identities differ, or one is empty. Raises RecordError for a damaged file.
        """
        path = self.path / constants.IDENTITY_FILE
        data = None
        with (
            translate_os_errors("read", path),
            contextlib.suppress(FileNotFoundError),
            open(path, "rb") as file,
        ):
            data = file.read(_MAX_SMALL_FILE_BYTES)
        if data is None:
            return ""
        match = re.fullmatch(rb'\s*\{\s*"id"\s*:\s*"([0-9a-f]{32})"\s*\}\s*', data)
        if match is None:
            raise NodeFileError(
                f"{path}: does not hold an identity. If no other process of this job runs, remove the file: "
                "the next start makes a new one."
            )
        return match[1].decode()

    def read_generation(self) -> int:
        """The greatest generation persisted here; 0 when none was.

        Raises RecordError for a file that does not hold one (taking that for 0 would unfence the stale), and
        MachineError where it cannot be read.
        """
        path = self.path / constants.GENERATION_FILE
        with translate_os_errors("read", path):
            try:
                data = path.read_bytes()[:_MAX_SMALL_FILE_BYTES]
            except FileNotFoundError:
                return 0
        record = _parse_json(data)
        number = record.get("generation") if record is not None else None
        if type(number) is not int or not 0 <= number <= _MAX_GENERATION:
            raise NodeFileError(_invalid_generation_message(path))
        return number

    def persist_generation(self, generation: int) -> int:
        """Make ``generation`` durable unless a greater one is already; return the greatest."""
        if not 0 <= generation <= _MAX_GENERATION:
            raise ValueError(f"generation {generation} is out of range")
        known = self.read_generation()
        if generation <= known:
            return known
        data = json.dumps({"generation": generation}) + "\n"
        self._disk.write_atomic(self.path / constants.GENERATION_FILE, data.encode())
        return generation

    def ensure_free_space(self, bytes_needed: int) -> None:
        """Raise MachineError when a file cannot be made here, or ``bytes_needed`` are not free."""
        probe = self.path / temporary_name("probe")
        try:
            self._disk.write_file(probe, b"room?")
        finally:
            if probe.exists():
                self._disk.unlink(probe)
        with translate_os_errors("look at", self.path):
            free = resources.free_disk_bytes(self.path, os.environ)
        if free < bytes_needed:
            limited = resources.read_checkpoint_limit(os.environ)
            left = format_bytes(free) + (
                f" of the volume's {format_bytes(limited)}" if limited is not None else ""
            )
            raise MachineError(
                f"cannot save to {self.path}: {format_bytes(bytes_needed)} are needed and {left} are free; "
                "free space there, lower --keep, or choose another --ckpt-dir."
            )


class _Lock:
    """A filelock, held until `release`, until nothing refers to it, or until this process ends.

    The kernel ties an flock to the open file, which a fork shares: unlocking in a child would free the
    parent's lock. filelock takes care of that from 4.0 on; ours is to know who holds what in this process.
    """

    def __init__(self, path: Path, lock: filelock.BaseFileLock) -> None:
        self._key = path.parent.resolve()
        self._lock = lock
        self._pid = os.getpid()
        _lock_pids[self._key] = self._pid

    @classmethod
    def acquire(cls, path: Path, timeout_s: float) -> _Lock | None:
        """Take the lock; None when another holds it for ``timeout_s`` more."""
        # Not thread-local: whoever shuts the process down may be another thread than the one that claimed.
        lock = filelock.FileLock(path, timeout=timeout_s, thread_local=False)
        with translate_os_errors("lock", path):
            try:
                lock.acquire()
            except filelock.Timeout:  # an OSError too
                return None
        return cls(path, lock)

    def release(self) -> None:
        """Unlock, in the process that locked; in a fork do nothing."""
        if os.getpid() == self._pid:
            _lock_pids.pop(self._key, None)
            self._lock.release()

    def __del__(self) -> None:
        self.release()


def _node_path(ckpt_dir: Path, run_id: str, node: str) -> Path:
    for what, name in (("run id", run_id), ("node name", node)):
        if not re.fullmatch(constants.SAFE_NAME_PATTERN, name):
            raise ConfigError(
                f"{what} {name!r} cannot be the name of a directory: use at most 128 letters, digits, '.', "
                "'_' and '-', beginning with a letter or digit."
            )
    return ckpt_dir / run_id / node


def _encode_lock_owner() -> bytes:
    command = " ".join([Path(sys.executable).name, *sys.argv])
    note = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": command[:4096],
        "since": round(time.time(), 3),
    }
    return (json.dumps(note) + "\n").encode()


def _node_taken_message(path: Path, node: str) -> str:
    owner = _read_json(path / constants.LOCK_OWNER_FILE) or {}
    since = owner.get("since")
    known = isinstance(since, (int, float)) and 0 <= since < 1e11
    when = time.strftime(" since %Y-%m-%d %H:%M:%S UTC", time.gmtime(since)) if known else ""
    return (
        f"node name {node!r} is taken: {path} is held by process {owner.get('pid', '?')} on host "
        f"{owner.get('host', '?')}{when} ({owner.get('command', 'command unknown')}). "
        "End that one, or give this one another --node-name."
    )


def _invalid_generation_message(path: Path) -> str:
    return (
        f"{path}: does not hold a generation. If no other process of this job runs, remove the file: "
        "the generation then follows from the checkpoints."
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a small JSON object; None when it is missing or is not one."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return _parse_json(file.read(_MAX_SMALL_FILE_BYTES))
    return None


def _parse_json(data: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(data)
        return record if isinstance(record, dict) else None
    return None


_MAX_JOB_START_BYTES = 4096
JOB_START_FILE = "job-start.json"
_MAX_ARGUMENTS_BYTES = 64 * 1024
SCRIPT_ARGUMENTS_FILE = "script-arguments.json"
# --api-key, HF_TOKEN, db.password, apiKey; not --tokenizer, --max-tokens or --keypoints.
_SECRET_NAME_PATTERN = re.compile(r"(?i:keys?|token|secrets?|passwords?)(?![a-z])[^=]*(=|\Z)", re.DOTALL)
MASK = "***"


def read_min_generation(node_dir: Path, launcher_id: str, generation: int) -> tuple[int, bool]:
    """Give (floor, whether this supervisor has been in a world before).

    Args:
        node_dir: the node's directory.
        supervisor: names one life of one process, as "pid start-time".
        generation: the greatest generation this node knows now.

    Raises:
        RecordError: the note exists and is not one.
        MachineError: it cannot be read.

    """
    path = node_dir / JOB_START_FILE
    with translate_os_errors("read", path):
        if not os.path.lexists(path):
            return generation, False
        with open(path, "rb") as file:
            data = file.read(_MAX_JOB_START_BYTES)
    try:
        note = json.loads(data)
        named, floor = note["launcher_id"], note["floor"]
        if type(named) is not str or type(floor) is not int:
            raise ValueError("supervisor or floor is of a wrong type")  # noqa: TRY301
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NodeFileError(
            f"{path}: is damaged ({type(error).__name__}: {error}), so which checkpoints are older than this "
            "start of the job is not known. Remove the file: all that exist now then count as older."
        ) from error
    return (floor, True) if named == launcher_id else (generation, False)


def record_job_start(node_dir: Path, launcher_id: str, min_generation: int, disk: Disk = DISK) -> None:
    """Record that ``supervisor`` has entered a world above ``floor``."""
    disk.write_atomic(
        node_dir / JOB_START_FILE, json.dumps({"launcher_id": launcher_id, "floor": min_generation}).encode()
    )


def read_script_arguments(node_dir: Path) -> tuple[str, list[str]]:
    """Return the supervisor and the script's words of the last start here, empty where they are not known."""
    try:
        with open(node_dir / SCRIPT_ARGUMENTS_FILE, "rb") as file:
            found = json.loads(file.read(_MAX_ARGUMENTS_BYTES))
        supervisor, words = found["launcher_id"], found["words"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "", []
    is_valid = isinstance(supervisor, str) and isinstance(words, list)
    return (supervisor, [str(word) for word in words]) if is_valid else ("", [])


def record_script_arguments(
    node_dir: Path, launcher_id: str, arguments: Sequence[str], disk: Disk = DISK
) -> None:
    """Record the words with which ``supervisor`` starts the script. A disk that refuses changes nothing."""
    kept = mask_secrets(arguments)
    if read_script_arguments(node_dir) == (launcher_id, kept):
        return  # a restart, which shall not wait for the disk
    data = json.dumps({"launcher_id": launcher_id, "words": kept}).encode()
    if len(data) > _MAX_ARGUMENTS_BYTES:
        data = json.dumps({"launcher_id": launcher_id, "words": []}).encode()
    with contextlib.suppress(MachineError):
        disk.write_atomic(node_dir / SCRIPT_ARGUMENTS_FILE, data)


def mask_secrets(arguments: Sequence[str]) -> list[str]:
    """Replace the values of arguments that are secret by name, as in ``--x=VALUE`` and ``--x VALUE``."""
    found: list[str] = []
    follows = False  # whether the word may be the value of the one before it
    for word in arguments:
        name = _SECRET_NAME_PATTERN.search(word)
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


COMMITTED_FILE = "committed.json"


def record_committed_generation(node_dir: Path, generation: int, disk: Disk = DISK) -> None:
    """Record, after its commit, that a checkpoint of ``generation`` exists. Writes once for a generation.

    A disk that refuses is not told: the checkpoint is there, and the next commit tries again.
    """
    if read_committed_generation(node_dir) >= generation:
        return
    with contextlib.suppress(MachineError):
        disk.write_atomic(node_dir / COMMITTED_FILE, json.dumps({"generation": generation}).encode())


def read_committed_generation(node_dir: Path) -> int:
    """The newest generation of which this node has committed a checkpoint; 0 when none is known."""
    try:
        with open(node_dir / COMMITTED_FILE, "rb") as file:
            generation = json.loads(file.read(4096))["generation"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0  # a safety net: what cannot be read stops nobody
    return generation if type(generation) is int and 0 <= generation <= 1 << 53 else 0
