"""Own a node's directory ``CKPT_DIR/RUN_ID/NODE`` and keep the node's small durable records in it.

- ``lock``: one process owns the directory at a time; a fork of the owner cannot release it.
- ``identity.json``: a random id, written once. Hosts with equal node names but different disks have different
  ids.
- ``generation.json``: the greatest generation seen; it never decreases.
- ``job-start.json``: the launcher (agent or torchrun) under which the node last entered a generation, and the
  greatest generation known when that job started. ``--resume never`` ignores checkpoints up to that
  generation, but not those saved since. A crash between two writes leaves the record of another launcher,
  which ignores nothing that this job has saved.
- ``script-arguments.json``: the script's last arguments, secrets masked, to report what changed. It is never
  relied upon.
- ``committed.json``: the newest generation with a commit. A node without checkpoints is new or has lost its
  disk, unless this file shows that they were removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.checkpoint.atomic_io import DISK, Disk, temporary_name, translate_os_errors
from elastic_resume.errors import ConfigError, MachineError, NodeFileError, NodeLockedError, UsageError
from elastic_resume.schedulers import resources
from elastic_resume.units import format_bytes

JOB_START_FILE = "job-start.json"
SCRIPT_ARGUMENTS_FILE = "script-arguments.json"
COMMITTED_FILE = "committed.json"
LOCK_POLL_S = 0.05
MASK = "***"
# --api-key, HF_TOKEN, db.password, apiKey; not --tokenizer, --max-tokens or --keypoints.
_SECRET_NAME_PATTERN = re.compile(r"(?i:keys?|token|secrets?|passwords?)(?![a-z])[^=]*(=|\Z)", re.DOTALL)
_MAX_SMALL_FILE_BYTES = 64 * 1024
_MAX_GENERATION = 1 << 53
_lock_pids: dict[Path, int] = {}  # locked directory -> pid that locked it; a fork has another pid


class NodeDir:
    """A node's directory, opened by its owner (`claim`) or by a worker of the owner (`attach`)."""

    def __init__(self, path: Path, lock: _Lock | None, disk: Disk) -> None:
        """Use `claim` or `attach`."""
        self.path = path
        self._lock = lock
        self._disk = disk

    @staticmethod
    def claim(ckpt_dir: Path, run_id: str, node: str, timeout_s: float = 2.0, disk: Disk = DISK) -> NodeDir:
        """Create the directory if necessary and become its owner.

        Raises:
            NodeLockedError: another process owns it for ``timeout_s`` more; the message names the owner.
            UsageError: this process owns it already.
            ConfigError: the run id or node name is not a safe directory name.
            MachineError: the directory cannot be created.
            NodeFileError: its identity file is damaged.

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
                identity = json.dumps({"id": secrets.token_hex(16)}) + "\n"
                disk.write_atomic(path / constants.IDENTITY_FILE, identity.encode())
        except BaseException:
            node_dir.release()
            raise
        return node_dir

    @staticmethod
    def attach(ckpt_dir: Path, run_id: str, node: str, disk: Disk = DISK) -> NodeDir:
        """Open the directory for a worker whose agent holds the lock; create it if necessary."""
        path = _node_path(ckpt_dir, run_id, node)
        disk.make_dirs(path)
        return NodeDir(path, None, disk)

    def release(self) -> None:
        """Give up ownership; does nothing on a second call, in a fork, or after `attach`."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def __enter__(self) -> NodeDir:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def read_identity(self) -> str:
        """Return the directory's random id of 32 hexadecimal digits; empty before its first owner.

        Raises:
            NodeFileError: the file is damaged.

        """
        path = self.path / constants.IDENTITY_FILE
        with translate_os_errors("read", path):
            try:
                data = path.read_bytes()[:_MAX_SMALL_FILE_BYTES]
            except FileNotFoundError:
                return ""
        match = re.fullmatch(rb'\s*\{\s*"id"\s*:\s*"([0-9a-f]{32})"\s*\}\s*', data)
        if match is None:
            raise NodeFileError(
                f"{path}: does not hold an identity. If no other process of this job runs, remove the file; "
                "the next start writes a new one."
            )
        return match[1].decode()

    def read_generation(self) -> int:
        """Return the greatest persisted generation, 0 if there is none.

        Raises:
            NodeFileError: the file is damaged; to assume 0 would let an outdated node take part.
            MachineError: it cannot be read.

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
            raise NodeFileError(
                f"{path}: does not hold a generation. If no other process of this job runs, remove the file; "
                "the generation then follows from the checkpoints."
            )
        return number

    def persist_generation(self, generation: int) -> int:
        """Make ``generation`` durable unless a greater one is; return the greatest."""
        if not 0 <= generation <= _MAX_GENERATION:
            raise ValueError(f"generation {generation} is out of range")
        known = self.read_generation()
        if generation <= known:
            return known
        data = json.dumps({"generation": generation}) + "\n"
        self._disk.write_atomic(self.path / constants.GENERATION_FILE, data.encode())
        return generation

    def ensure_free_space(self, bytes_needed: int) -> None:
        """Raise MachineError if a file cannot be created here, or ``bytes_needed`` are not free."""
        probe = self.path / temporary_name("probe")
        try:
            self._disk.write_file(probe, b"probe")
        finally:
            if probe.exists():
                self._disk.unlink(probe)
        with translate_os_errors("read", self.path):
            free = resources.free_disk_bytes(self.path, os.environ)
        if free < bytes_needed:
            limit = resources.read_checkpoint_limit(os.environ)
            volume = f" of the volume's {format_bytes(limit)}" if limit is not None else ""
            raise MachineError(
                f"cannot save to {self.path}: {format_bytes(bytes_needed)} are needed and "
                f"{format_bytes(free)}{volume} are free; "
                "free space there, lower --keep, or choose another --ckpt-dir."
            )


class _Lock:
    """Hold an flock on a file until `release` or the end of this process.

    A fork shares the open file and with it the lock, so each fork closes its descriptor: otherwise a child
    would hold the lock of a dead owner. filelock is not used: it resolves ``/proc/PID/fd/N/lock`` to a file
    of the host, so simulated nodes with a disk each would share one lock.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._key = path.parent.resolve()
        self._descriptor = descriptor
        self._pid = os.getpid()
        _lock_pids[self._key] = self._pid
        _held_locks.add(self)

    @classmethod
    def acquire(cls, path: Path, timeout_s: float) -> _Lock | None:
        """Take the lock; return None if another process holds it for ``timeout_s`` more."""
        deadline = time.monotonic() + timeout_s
        with translate_os_errors("lock", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                while not _try_lock(descriptor):
                    if time.monotonic() >= deadline:
                        os.close(descriptor)
                        return None
                    time.sleep(LOCK_POLL_S)
            except OSError:
                os.close(descriptor)
                raise
        return cls(path, descriptor)

    def release(self) -> None:
        """Unlock in the process that locked; do nothing in a fork and on a second call."""
        if os.getpid() == self._pid and self._descriptor >= 0:
            _lock_pids.pop(self._key, None)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.close()

    def close(self) -> None:
        """Close the descriptor; the lock stays if another process has the file open."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close_locks_of_parent() -> None:
    for lock in list(_held_locks):
        lock.close()
    _held_locks.clear()


_held_locks: weakref.WeakSet[_Lock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_locks_of_parent)


def _node_path(ckpt_dir: Path, run_id: str, node: str) -> Path:
    for setting, name in (("run id", run_id), ("node name", node)):
        if not re.fullmatch(constants.SAFE_NAME_PATTERN, name):
            raise ConfigError(
                f"{setting} {name!r} cannot be the name of a directory: use at most 128 letters, digits, "
                "'.', '_' and '-', beginning with a letter or digit."
            )
    return ckpt_dir / run_id / node


def _encode_lock_owner() -> bytes:
    command = " ".join([Path(sys.executable).name, *sys.argv])
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": command[:4096],
        "since": round(time.time(), 3),
    }
    return (json.dumps(owner) + "\n").encode()


def _node_taken_message(path: Path, node: str) -> str:
    owner = _read_json(path / constants.LOCK_OWNER_FILE) or {}
    since = owner.get("since")
    is_known = isinstance(since, (int, float)) and 0 <= since < 1e11
    when = time.strftime(" since %Y-%m-%d %H:%M:%S UTC", time.gmtime(since)) if is_known else ""
    return (
        f"node name {node!r} is taken: {path} is held by process {owner.get('pid', '?')} on host "
        f"{owner.get('host', '?')}{when} ({owner.get('command', 'command unknown')}). "
        "End that process, or give this node another --node-name."
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a small JSON object; return None if it is missing or invalid."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return _parse_json(file.read(_MAX_SMALL_FILE_BYTES))
    return None


def _parse_json(data: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(data)
        return record if isinstance(record, dict) else None
    return None


def read_min_generation(node_dir: Path, launcher_id: str, generation: int) -> tuple[int, bool]:
    """Return the generation up to which checkpoints predate this job, and whether the launcher is known.

    Args:
        node_dir: the node's directory.
        launcher_id: "pid start-time" of the agent or torchrun.
        generation: the greatest generation this node knows now.

    Raises:
        NodeFileError: the record is damaged.
        MachineError: it cannot be read.

    """
    path = node_dir / JOB_START_FILE
    with translate_os_errors("read", path):
        if not os.path.lexists(path):
            return generation, False
        with open(path, "rb") as file:
            data = file.read(_MAX_SMALL_FILE_BYTES)
    try:
        record = json.loads(data)
        recorded_id, min_generation = record["launcher_id"], record["floor"]
        if type(recorded_id) is not str or type(min_generation) is not int:
            raise ValueError("launcher_id or floor has a wrong type")  # noqa: TRY301
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NodeFileError(
            f"{path}: is damaged ({type(error).__name__}: {error}). It records which checkpoints are older "
            "than this start of the job. Remove the file; all checkpoints that exist now then count as older."
        ) from error
    return (min_generation, True) if recorded_id == launcher_id else (generation, False)


def record_job_start(node_dir: Path, launcher_id: str, min_generation: int, disk: Disk = DISK) -> None:
    """Record that ``launcher_id`` entered a generation above ``min_generation``."""
    disk.write_atomic(
        node_dir / JOB_START_FILE, json.dumps({"launcher_id": launcher_id, "floor": min_generation}).encode()
    )


def read_script_arguments(node_dir: Path) -> tuple[str, list[str]]:
    """Return the launcher and the script arguments of the last start; empty if unknown."""
    record = _read_json(node_dir / SCRIPT_ARGUMENTS_FILE) or {}
    launcher_id, arguments = record.get("launcher_id"), record.get("words")
    if not isinstance(launcher_id, str) or not isinstance(arguments, list):
        return "", []
    return launcher_id, [str(argument) for argument in arguments]


def record_script_arguments(
    node_dir: Path, launcher_id: str, arguments: Sequence[str], disk: Disk = DISK
) -> None:
    """Record the arguments of this start with secrets masked; ignore a failing disk."""
    masked = mask_secrets(arguments)
    if read_script_arguments(node_dir) == (launcher_id, masked):
        return  # a restart, which must not wait for the disk
    data = json.dumps({"launcher_id": launcher_id, "words": masked}).encode()
    if len(data) > _MAX_SMALL_FILE_BYTES:
        data = json.dumps({"launcher_id": launcher_id, "words": []}).encode()
    with contextlib.suppress(MachineError):
        disk.write_atomic(node_dir / SCRIPT_ARGUMENTS_FILE, data)


def mask_secrets(arguments: Sequence[str]) -> list[str]:
    """Mask the values of arguments with secret names, as in ``--token=VALUE`` and ``--token VALUE``."""
    masked: list[str] = []
    may_be_secret_value = False
    for argument in arguments:
        name = _SECRET_NAME_PATTERN.search(argument)
        if may_be_secret_value and not argument.startswith("-"):
            masked.append(MASK)
            may_be_secret_value = False
        elif name is not None and name[1]:
            masked.append(argument[: name.end()] + MASK)
            may_be_secret_value = False
        else:
            masked.append(argument)
            may_be_secret_value = name is not None and argument.startswith("-")
    return masked


def record_committed_generation(node_dir: Path, generation: int, disk: Disk = DISK) -> None:
    """Record, after its commit, that a checkpoint of ``generation`` exists; write once per generation.

    A failing disk is ignored: the checkpoint exists, and the next commit writes the record again.
    """
    if read_committed_generation(node_dir) >= generation:
        return
    with contextlib.suppress(MachineError):
        disk.write_atomic(node_dir / COMMITTED_FILE, json.dumps({"generation": generation}).encode())


def read_committed_generation(node_dir: Path) -> int:
    """Return the newest generation with a commit by this node; 0 if unknown."""
    record = _read_json(node_dir / COMMITTED_FILE) or {}  # only a safety check depends on it
    generation = record.get("generation")
    return generation if type(generation) is int and 0 <= generation <= _MAX_GENERATION else 0
