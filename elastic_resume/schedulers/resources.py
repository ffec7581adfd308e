"""The memory of this machine that a job may use: what its control groups leave, or all of it.

A limit of any ancestor counts: Slurm sets it on the job or the step, and the task's own group has none.

Promise: what cannot be read is no limit, and never an error. Changes nothing.

How much a folder may still take, where its file system does not tell: /dev/shm, and volumes of a pod.

An emptyDir in memory is a tmpfs of its ``sizeLimit``, which statvfs tells. One on the node's disk shows the
whole disk, and a pod that exceeds the limit is evicted by kubelet: so the limit has to be told, as
``ELASTIC_RESUME_CKPT_LIMIT``.

Promise: what cannot be read is no limit and never an error, but for a limit that is no size. Changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_resume import constants
from elastic_resume.schedulers import kubernetes


@dataclass(frozen=True)
class Group:
    """The control group of this process, as far as memory goes: where its files are, and their names."""

    directory: Path
    events: str
    current: str
    limit: str
    cached: tuple[str, str]
    """Fields of memory.stat: what is cached, shared memory included, and shared memory."""
    top: Path | None = None
    """Where its hierarchy is mounted; None where its ancestors are not looked at."""

    @classmethod
    def of_this_process(cls, proc: Path = Path("/proc")) -> Group | None:
        """Find it; None where this process is in none, or cannot see it."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            mounts = [_mount(line) for line in (proc / "self/mountinfo").read_text().splitlines()]
            for line in (proc / "self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if "memory" in controllers.split(","):
                    found = _directory(mounts, path, "cgroup", "memory")
                    if found is not None:
                        return cls.of(found[0], version=1, top=found[1])
            for line in (proc / "self/cgroup").read_text().splitlines():
                if line.startswith("0::"):
                    found = _directory(mounts, line[3:], "cgroup2", "")
                    # Groups below the one for which memory is counted have none of its files.
                    for directory in _upwards(*found) if found is not None else ():
                        if (directory / "memory.events").exists():
                            return cls.of(directory, version=2, top=found[1] if found else None)
        return None

    @classmethod
    def of(cls, directory: Path, *, version: int, top: Path | None = None) -> Group:
        """Give the group whose files lie there; ``top``: the directory in which its hierarchy is mounted."""
        if version == 1:
            names = ("memory.oom_control", "memory.usage_in_bytes", "memory.limit_in_bytes")
            return cls(directory, *names, cached=("total_cache", "total_shmem"), top=top)
        names = ("memory.events", "memory.current", "memory.max")
        return cls(directory, *names, cached=("file", "shmem"), top=top)

    def kills(self) -> int:
        """How many of its processes the kernel has killed for want of memory; 0 where that is not told."""
        return fields(self.directory / self.events).get("oom_kill", 0)

    def used(self) -> tuple[int, int] | None:
        """Bytes in use that cannot be taken back, and their limit; None where there is none.

        Of the group and its ancestors, those of the one that leaves least.
        """
        found = (self._used_in(directory) for directory in _upwards(self.directory, self.top))
        return min((one for one in found if one is not None), key=lambda one: one[1] - one[0], default=None)

    def _used_in(self, directory: Path) -> tuple[int, int] | None:
        try:
            limit = (directory / self.limit).read_text().strip()
            current = int((directory / self.current).read_text())
            stat = fields(directory / "memory.stat")
        except (OSError, ValueError):
            return None
        if not limit.isdigit() or int(limit) >= 1 << 60:  # "max", or the number that says so in version 1
            return None
        cached, shared = self.cached
        return current - max(0, stat.get(cached, 0) - stat.get(shared, 0)), int(limit)


def available(proc: Path = Path("/proc"), group: Group | None = None) -> int:
    """Bytes that can still be taken without swapping or being killed; 0 where nothing can be told."""
    group = group or Group.of_this_process(proc)
    free = fields(proc / "meminfo").get("MemAvailable:", 0) << 10
    used = group.used() if group else None
    return free if used is None else min(free or used[1], max(0, used[1] - used[0]))


def _mount(line: str) -> tuple[str, str, str, str]:
    """Root, mount point, file system and its options: see proc(5), mountinfo."""
    before, _, after = line.partition(" - ")
    words, kind = before.split(), after.split()
    return words[3], words[4], kind[0], kind[2]


def _directory(
    mounts: list[tuple[str, str, str, str]], path: str, kind: str, option: str
) -> tuple[Path, Path] | None:
    """Where the group of that path is, and its mount point; in a container the path may be the host's."""
    for root, point, system, options in mounts:
        if system != kind or (option and option not in options.split(",")):
            continue
        inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else "/"
        for found in (Path(point + "/" + inside.lstrip("/")), Path(point)):
            if found.is_dir():
                return found, Path(point)
    return None


def _upwards(directory: Path, top: Path | None) -> list[Path]:
    """That directory and those above it, up to ``top``; it alone where it is not below that."""
    if top is None or not directory.is_relative_to(top):
        return [directory]
    return [directory, *(above for above in directory.parents if above.is_relative_to(top))]


def fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number; empty where it cannot be read."""
    found = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[1].isdigit():
                found[words[0]] = int(words[1])
    return found


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only looked at
LITTLE_SHARED_MEMORY = 128 << 20  # a pod's or container's /dev/shm has 64 MB unless somebody gives it more
MAX_ENTRIES = 1_000_000  # looked at; a folder of checkpoints has hundreds


def why_little_shared_memory(path: Path = SHARED_MEMORY) -> str:
    """Say what is wrong with /dev/shm and what to do; empty where nothing is."""
    what_to_do = (
        "make it larger (in Kubernetes an emptyDir with medium: Memory, docker run --shm-size 1g), or "
        "DataLoader workers and NCCL die of SIGBUS when it is full"
    )
    try:
        total = shutil.disk_usage(path).total
    except OSError:
        return f"there is no {path}: {what_to_do}"
    if total >= LITTLE_SHARED_MEMORY:
        return ""
    return f"{path} has {total >> 20} MiB, a container's default: {what_to_do}"


def limit(environ: Mapping[str, str]) -> int | None:
    """Bytes that the volume of ``ELASTIC_RESUME_CKPT_DIR`` may hold; None where nobody says.

    Raises:
        ConfigError: it is no size.

    """
    text = environ.get(constants.ENV_CKPT_LIMIT, "").strip()
    return kubernetes.size_bytes(text, constants.ENV_CKPT_LIMIT) if text else None


def free(path: Path, environ: Mapping[str, str]) -> int:
    """Bytes that may still be written below ``path``.

    Raises:
        OSError: ``path`` cannot be looked at.
        ConfigError: the limit that the environment tells is no size.

    """
    left = shutil.disk_usage(path).free
    volume = Path(environ.get(constants.ENV_CKPT_DIR) or path).absolute()
    most = limit(environ)
    # The limit is the volume's, and says nothing of a folder elsewhere.
    if most is None or not path.absolute().is_relative_to(volume):
        return left
    return min(left, max(0, most - used(volume)))


def used(path: Path) -> int:
    """Bytes that files below ``path`` take on the disk, each once."""
    total, seen, entries = 0, set(), 0
    for folder, _, files in os.walk(path):
        for name in files:
            entries += 1
            if entries > MAX_ENTRIES:
                return total
            with contextlib.suppress(OSError):  # gone meanwhile
                found = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - a million Paths are slow
                if stat.S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    total += found.st_blocks * 512
    return total
