"""Keep torch's compile artifacts in one file per rank of a node, and refuse one that is not this job's.

A file is a line of JSON, which `Origin` and the size and digest of the artifacts make, and the artifacts.
They are code, so they are returned only if all of this holds:

- the file belongs to this user, and nobody else can write to it;
- it is of this job, and of the same torch, Python and processor (`Origin`);
- its size and its SHA-256 digest are those of its first line.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from elastic_resume import constants
from elastic_resume.checkpoint.atomic_io import DISK, Disk, temporary_name
from elastic_resume.errors import CorruptError
from elastic_resume.units import format_bytes

MAX_BYTES = 256 << 20  # of one rank; a large model's artifacts have some ten megabytes
MAX_HEADER_BYTES = 4096
DIRECTORY = "compile-cache"
FORMAT = 1


@dataclass(frozen=True)
class Origin:
    """Where artifacts were made: they are of no use, and perhaps harmful, where a field differs."""

    job: str
    torch: str
    python: str
    processor: str
    gpu: str

    @classmethod
    def here(cls, job: str) -> Origin:
        """Return the origin of what this process compiles."""
        gpu = ""
        if torch.cuda.is_initialized():
            gpu = f"{torch.cuda.get_device_name()}, {torch.version.cuda or torch.version.hip}"
        return cls(
            job,
            f"{torch.__version__} {torch.version.git_version}",
            f"{platform.python_implementation()} {platform.python_version()}",
            f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_digest_processor_flags()}",
            gpu,
        )

    @property
    def digest(self) -> str:
        """Equal origins have equal digests."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    def describe_difference(self, header: object) -> str:
        """Return how the origin in a file's header differs from this one; empty if it does not."""
        theirs = header if isinstance(header, dict) else {}
        for name, ours in asdict(self).items():
            if theirs.get(name) != ours:
                return f"its {name} is {str(theirs.get(name))[:100]!r}, and here it is {ours!r}"
        return ""


def digest(artifacts: bytes | bytearray | memoryview) -> str:
    """Return the digest by which artifacts are verified."""
    return hashlib.sha256(artifacts).hexdigest()


class ArtifactFile:
    """The artifacts of one rank of this node."""

    def __init__(self, node_dir: Path, local_rank: int, origin: Origin, disk: Disk = DISK) -> None:
        self.path = node_dir / DIRECTORY / f"rank{local_rank}"
        self._origin, self._disk = origin, disk

    def read(self) -> bytes | None:
        """Return the artifacts; None if there is no file.

        Raises:
            CorruptError: the file is damaged, foreign, or too large.
            OSError: it cannot be read.

        """
        try:
            # A link is not followed: whoever may make one here could name another user's file.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CorruptError("it is no regular file")
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise CorruptError("another user owns it or may write to it")
            if status.st_size > MAX_HEADER_BYTES + MAX_BYTES:
                raise CorruptError(f"it has {format_bytes(status.st_size)}, which is too much")
            return self._verify(file.readline(MAX_HEADER_BYTES), file.read(MAX_BYTES + 1))

    def write(self, artifacts: bytes) -> None:
        """Replace the file.

        Raises:
            MachineError: the disk refuses.

        """
        header = {"format": FORMAT, **asdict(self._origin)}
        header |= {"size": len(artifacts), "sha256": digest(artifacts)}
        self._disk.make_dirs(self.path.parent)
        for left in self.path.parent.glob(f"{constants.TEMPORARY_PREFIX}{self.path.name}-*"):
            self._disk.unlink(left)  # of a process that was killed: only this rank's writes have the name
        temporary = self.path.with_name(temporary_name(self.path.name))
        descriptor = self._disk.create(temporary)
        try:
            os.fchmod(descriptor, 0o600)
            self._disk.write(descriptor, json.dumps(header).encode() + b"\n" + artifacts, temporary)
            self._disk.sync_file(descriptor, temporary)
        finally:
            self._disk.close(descriptor, temporary)
        self._disk.rename(temporary, self.path)
        self._disk.sync_dir(self.path.parent)

    def _verify(self, line: bytes, artifacts: bytes) -> bytes:
        try:
            header = json.loads(line)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise CorruptError("its first line is not of this version")
        if difference := self._origin.describe_difference(header):
            raise CorruptError(difference)
        if header.get("size") != len(artifacts):
            raise CorruptError(
                f"it is damaged: it has {len(artifacts)} bytes, not {header.get('size')!r:.40}"
            )
        if header.get("sha256") != digest(artifacts):
            raise CorruptError("it is damaged: its digest is another one")
        return artifacts


def _digest_processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Digest what the processor can execute: code for AMX is of no use without it."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return "unknown"
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return digest(" ".join(sorted(flags[1].split())).encode())[:12] if flags else "unknown"
