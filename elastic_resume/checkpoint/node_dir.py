"""Lock a node's directory ``CKPT_DIR/RUN_ID/NODE``, and read and write its small JSON files.

- ``lock``, ``owner-lease``: one process owns the directory at a time (`dir_lock`).
- ``identity.json``: a random id, written once. Hosts with equal node names but different disks have different
  ids.
- ``generation.json``: the greatest generation seen; it never decreases.
- ``moved-aside.json``: the launcher for which `NodeDir.move_earlier_run_aside` has moved all else, so that a
  restart under this launcher keeps what was saved since.
- ``script-arguments.json``: the script's last arguments, secrets masked, to report what changed. It is never
  relied upon.
- ``committed.json``: the newest generation with a commit. It tells a node whose checkpoints were deleted from
  a new node.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic_resume import constants, machine
from elastic_resume.checkpoint import dir_lock
from elastic_resume.checkpoint.atomic_io import DISK, Disk, temporary_name, translate_os_errors
from elastic_resume.checkpoint.dir_lock import DirLock
from elastic_resume.errors import ConfigError, MachineError, NodeFileError, NodeLockedError, UsageError
from elastic_resume.units import format_bytes

logger = logging.getLogger(__name__)

MOVED_ASIDE_FILE = "moved-aside.json"
SCRIPT_ARGUMENTS_FILE = "script-arguments.json"
COMMITTED_FILE = "committed.json"
MASK = "***"
# Matches --api-key, HF_TOKEN, db.password and apiKey, but not --tokenizer, --max-tokens or --keypoints.
_SECRET_NAME_PATTERN = re.compile(r"(?i:keys?|token|secrets?|passwords?)(?![a-z])[^=]*(=|\Z)", re.DOTALL)
# The value of such a name in JSON, YAML or Python: {"api_key": "VALUE"}, {hf_token: VALUE}.
_SECRET_MEMBER_PATTERN = re.compile(
    r"((?i:keys?|token|secrets?|passwords?)(?![a-z])[\w.-]*[\"']?\s*:\s*)(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^,}\]\n]+)"
)
_FLAG_PATTERN = re.compile(r"--[A-Za-z][\w.-]*(=.*)?|-[A-Za-z]", re.DOTALL)
_MAX_SMALL_FILE_BYTES = 64 * 1024
_MAX_GENERATION = 1 << 53
# Files that `NodeDir.move_earlier_run_aside` keeps: they must not go back, or belong to the owner.
_LASTING_FILES = {
    constants.AGENT_ENDPOINT_FILE,
    constants.GENERATION_FILE,
    constants.IDENTITY_FILE,
    constants.LOCK_FILE,
    constants.LOCK_OWNER_FILE,
    constants.OWNER_LEASE_FILE,
    constants.RENDEZVOUS_STATE_FILE,
}


class NodeDir:
    """A node's directory, opened by its owner (`claim`) or by a worker of the owner (`attach`)."""

    def __init__(self, path: Path, disk: Disk = DISK, *, lock: DirLock | None = None) -> None:
        """Use `claim` or `attach`."""
        self.path = path
        self._disk = disk
        self._lock = lock  # the owner's

    @staticmethod
    def claim(
        ckpt_dir: Path,
        run_id: str,
        node: str,
        timeout_s: float = 2.0,
        disk: Disk = DISK,
        *,
        command: Sequence[str] | None = None,
    ) -> NodeDir:
        """Create the directory if necessary and own it until `release` or the end of this process.

        Others read ``command`` if they find it taken; by default the words of this process.

        Raises:
            NodeLockedError: another process owns it for ``timeout_s`` more; the message names the owner.
            UsageError: this process owns it already.
            ConfigError: the run id or node name is not a safe directory name.
            MachineError: the directory cannot be created, or takes no more files.
            NodeFileError: its identity file is damaged.

        """
        path = _node_path(ckpt_dir, run_id, node)
        if dir_lock.is_owned(path):
            raise UsageError(
                f"this process has already resumed job {run_id!r} under node name {node!r}; "
                "call run.close() first."
            )
        disk.make_dirs(path)
        lock = dir_lock.acquire(path, timeout_s)
        if lock is None:
            raise NodeLockedError(_node_taken_message(path, node))
        node_dir = NodeDir(path, disk, lock=lock)
        try:
            disk.write_atomic(path / constants.LOCK_OWNER_FILE, _encode_lock_owner(command or sys.argv))
            if not node_dir.read_identity():
                _require_inodes(path)
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
        return NodeDir(path, disk)

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
        """Return the directory's random id of 32 hexadecimal digits; empty before its first owner."""
        record = _read_required(
            self.path / constants.IDENTITY_FILE,
            lambda record: re.fullmatch("[0-9a-f]{32}", record["id"]) is not None,
            "If no other process of this job runs, remove the file; the next start writes a new one.",
        )
        return record["id"] if record is not None else ""

    def read_generation(self) -> int:
        """Return the greatest persisted generation, 0 if there is none.

        A damaged file is an error: to assume 0 would let an outdated node take part.
        """
        record = _read_required(
            self.path / constants.GENERATION_FILE,
            lambda record: _is_generation(record["generation"]),
            "If no other process of this job runs, remove the file; the generation then follows from the "
            "checkpoints.",
        )
        return record["generation"] if record is not None else 0

    def read_generation_of_run(self) -> int:
        """Return the greatest persisted generation of all nodes whose directories are visible here."""
        known = self.read_generation()
        for path in self.path.parent.glob(f"*/{constants.GENERATION_FILE}"):
            with contextlib.suppress(NodeFileError, MachineError):  # another node's; its owner reports it
                known = max(known, NodeDir(path.parent).read_generation())
        return known

    def persist_generation(self, generation: int) -> int:
        """Make ``generation`` durable unless a greater one is; return the greatest."""
        if not _is_generation(generation):
            raise ValueError(f"generation {generation} is out of range")
        known = self.read_generation()
        if generation <= known:
            return known
        data = json.dumps({"generation": generation}) + "\n"
        self._disk.write_atomic(self.path / constants.GENERATION_FILE, data.encode())
        return generation

    def move_earlier_run_aside(self, launcher_id: str = "") -> None:
        """Move what earlier starts left to ``RUN_ID.old-N/NODE``, for ``--resume never``.

        Only the owner may call this. With ``launcher_id`` the first call for that launcher moves: a restart
        within the job keeps what this start has saved. Generations continue above the old ones.

        Raises:
            MachineError: the disk refuses.
            NodeFileError: the record of the launcher is damaged.

        """
        marker = self.path / MOVED_ASIDE_FILE
        record = _read_required(
            marker,
            lambda record: type(record["launcher_id"]) is str,
            "Remove the file; the next start with --resume never then begins at step 0.",
        )
        if record is not None and record["launcher_id"] == launcher_id:
            return
        try:
            self._move_all_aside()
        except MachineError as error:
            raise MachineError(
                f"--resume never could not move the earlier run aside: {error} Or move {self.path} elsewhere "
                "yourself, or give another --rdzv-id."
            ) from error
        if launcher_id:  # after the move: a crash in between repeats the move
            self._disk.write_atomic(marker, json.dumps({"launcher_id": launcher_id}).encode())

    def _move_all_aside(self) -> None:
        with translate_os_errors("list", self.path):
            left = [
                path
                # committed.json last: what an interrupted move leaves is not taken for a fresh directory
                for path in sorted(
                    self.path.iterdir(), key=lambda path: (path.name == COMMITTED_FILE, path.name)
                )
                if path.name not in _LASTING_FILES and not path.name.startswith(constants.TEMPORARY_PREFIX)
            ]
        if not left:
            return
        run_dir, node = self.path.parent, self.path.name
        candidates = (run_dir.with_name(f"{run_dir.name}.old-{n}") / node for n in itertools.count(1))
        target = next(path for path in candidates if not os.path.lexists(path))
        self._disk.make_dirs(target)
        for path in left:
            self._disk.rename(path, target / path.name)
        self._disk.sync_dir(target)
        self._disk.sync_dir(self.path)
        logger.info(f"--resume never: the earlier run of node {node} was moved to {target}")

    def ensure_free_space(self, bytes_needed: int) -> None:
        """Raise MachineError if a file cannot be created here, or ``bytes_needed`` are not free."""
        probe = self.path / temporary_name("probe")
        descriptor = self._disk.create(probe)  # without fsync, which each restart would wait for
        try:
            self._disk.write(descriptor, b"probe", probe)
        finally:
            self._disk.close(descriptor, probe)
            self._disk.unlink(probe)
        with translate_os_errors("read", self.path):
            free = machine.free_disk_bytes(self.path, os.environ)
        if free < bytes_needed:
            limit = machine.read_checkpoint_limit(os.environ)
            volume = f" of the volume's {format_bytes(limit)}" if limit is not None else ""
            raise MachineError(
                f"cannot save to {self.path}: {format_bytes(bytes_needed)} are needed and "
                f"{format_bytes(free)}{volume} are free; "
                "free space there, lower --keep, or choose another --ckpt-dir."
            )


def _node_path(ckpt_dir: Path, run_id: str, node: str) -> Path:
    for setting, name in (("run id", run_id), ("node name", node)):
        if not re.fullmatch(constants.SAFE_NAME_PATTERN, name):
            raise ConfigError(
                f"{setting} {name!r} cannot be the name of a directory: use at most 128 letters, digits, "
                "'.', '_' and '-', beginning with a letter or digit."
            )
    return ckpt_dir / run_id / node


def _encode_lock_owner(words: Sequence[str]) -> bytes:
    command = " ".join([Path(sys.executable).name, *mask_secrets(words)])
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": command[:4096],
        "since": round(time.time(), 3),
    }
    return (json.dumps(owner) + "\n").encode()


def _node_taken_message(path: Path, node: str) -> str:
    owner = read_json(path / constants.LOCK_OWNER_FILE) or {}
    since = owner.get("since")
    is_known = isinstance(since, (int, float)) and 0 <= since < 1e11
    when = time.strftime(" since %Y-%m-%d %H:%M:%S UTC", time.gmtime(since)) if is_known else ""
    return (
        f"node name {node!r} is taken: {path} is held by process {owner.get('pid', '?')} on host "
        f"{owner.get('host', '?')}{when} ({owner.get('command', 'command unknown')}). "
        "End that process, or give this node another name: ELASTIC_RESUME_NODE_NAME."
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a small JSON object; return None if it is missing or invalid."""
    with contextlib.suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
        record = json.loads(file.read(_MAX_SMALL_FILE_BYTES))
        return record if isinstance(record, dict) else None
    return None


def _require_inodes(path: Path) -> None:
    """Raise MachineError if few more files fit: the agent would try for ever to record its first view."""
    with translate_os_errors("read", path):
        missing = machine.describe_missing_inodes(path)
    if missing:
        raise MachineError(f"{missing}.")


def _read_required(
    path: Path, is_valid: Callable[[dict[str, Any]], bool], advice: str
) -> dict[str, Any] | None:
    """Read a record whose content must not be guessed; return None if the file is missing.

    Raises:
        NodeFileError: the file is damaged.
        MachineError: it cannot be read.

    """
    with translate_os_errors("read", path):
        try:
            data = path.read_bytes()[:_MAX_SMALL_FILE_BYTES]
        except FileNotFoundError:
            return None
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        record: dict[str, Any] = json.loads(data)
        if is_valid(record):  # raises TypeError if it is no object
            return record
    raise NodeFileError(f"{path}: is damaged. {advice}")


def _is_generation(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_GENERATION


def read_script_arguments(node_dir: Path) -> tuple[str, list[str]]:
    """Return the launcher and the script arguments of the last start; empty if unknown."""
    record = read_json(node_dir / SCRIPT_ARGUMENTS_FILE) or {}
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
    data = json.dumps({"launcher_id": launcher_id, "words": masked})
    if len(data) > _MAX_SMALL_FILE_BYTES:
        data = json.dumps({"launcher_id": launcher_id, "words": []})
    with contextlib.suppress(MachineError):
        disk.write_atomic(node_dir / SCRIPT_ARGUMENTS_FILE, data.encode())


def record_settings(node_dir: Path, text: str) -> None:
    """Record the settings of this start for people; they have no secret. Ignore a failing disk."""
    with contextlib.suppress(OSError):
        (node_dir / constants.SETTINGS_FILE).write_bytes(text.encode(errors="replace"))


def mask_secrets(arguments: Sequence[str]) -> list[str]:
    """Mask the values of arguments with secret names.

    They may have the forms ``--token=VALUE``, ``--token VALUE`` and ``{"token": VALUE}``. A word after such a
    flag is its value, unless it looks like another flag: two dashes and a letter, or one dash and one letter.
    """
    masked = []
    for previous, argument in zip(["", *arguments], arguments):  # noqa: B905  the first is longer
        flag, name = _SECRET_NAME_PATTERN.search(previous), _SECRET_NAME_PATTERN.search(argument)
        if previous.startswith("-") and flag and not flag[1] and not _FLAG_PATTERN.fullmatch(argument):
            masked.append(MASK)
        elif name and name[1]:
            masked.append(argument[: name.end()] + MASK)
        else:
            masked.append(_SECRET_MEMBER_PATTERN.sub(rf'\1"{MASK}"', argument))
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
    # A damaged file counts as missing, because only a safety check uses it.
    record = read_json(node_dir / COMMITTED_FILE) or {}
    return int(record["generation"]) if _is_generation(record.get("generation")) else 0
