"""Measure the memory, the disk space, and the processes and threads that a job may use.

The control groups of this process limit memory, or the whole machine does. The limit of any ancestor group
counts: Slurm sets it on the job or the step, and the task's own group has none. The same holds for the number
of processes and threads.

The file system limits disk space, with one exception. A pod's emptyDir on the node's disk shows the whole
disk, and kubelet evicts a pod that exceeds the volume's limit, which ``ELASTIC_RESUME_CKPT_LIMIT`` gives. A
file that cannot be read means no limit.
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
from elastic_resume.units import parse_kubernetes_quantity


@dataclass(frozen=True)
class MemoryCgroup:
    """The memory control group of this process: the paths and names of its files."""

    directory: Path
    events_file: str
    usage_file: str
    limit_file: str
    cache_fields: tuple[str, str]
    """Fields of memory.stat: what is cached, shared memory included, and shared memory."""
    mount_point: Path | None = None
    """Where its hierarchy is mounted; None where its ancestors are not looked at."""

    @classmethod
    def find_own(cls, proc: Path = Path("/proc")) -> MemoryCgroup | None:
        """Find the group of this process; None if there is none or it is not visible."""
        found = _find_own_group(proc, "memory")
        return None if found is None else cls.from_directory(found[0], version=found[2], mount_point=found[1])

    @classmethod
    def from_directory(
        cls, directory: Path, *, version: int, mount_point: Path | None = None
    ) -> MemoryCgroup:
        """Return the group with its files in this directory."""
        if version == 1:
            names = ("memory.oom_control", "memory.usage_in_bytes", "memory.limit_in_bytes")
            return cls(
                directory, *names, cache_fields=("total_cache", "total_shmem"), mount_point=mount_point
            )
        names = ("memory.events", "memory.current", "memory.max")
        return cls(directory, *names, cache_fields=("file", "shmem"), mount_point=mount_point)

    def read_oom_kills(self) -> int:
        """Return how many of its processes the kernel's OOM killer has killed; 0 if unknown."""
        return read_fields(self.directory / self.events_file).get("oom_kill", 0)

    def read_usage(self) -> tuple[int, int] | None:
        """Return the unreclaimable bytes in use and their limit; None if there is no limit.

        Of the group and its ancestors, the group with the least free memory counts.
        """
        directories = _list_ancestors(self.directory, self.mount_point)
        usages = filter(None, map(self._read_usage_in, directories))
        return min(usages, key=lambda usage: usage[1] - usage[0], default=None)

    def _read_usage_in(self, directory: Path) -> tuple[int, int] | None:
        try:
            limit = (directory / self.limit_file).read_text().strip()
            current = int((directory / self.usage_file).read_text())
            stat = read_fields(directory / "memory.stat")
        except (OSError, ValueError):
            return None
        if not limit.isdigit() or int(limit) >= 1 << 60:  # "max"; cgroup version 1 has a huge number instead
            return None
        cached, shared = self.cache_fields
        return current - max(0, stat.get(cached, 0) - stat.get(shared, 0)), int(limit)


PROCESSES_OF_AGENT, PROCESSES_PER_WORKER = 20, 12  # threads included, without loader workers and OpenMP
PROCESS_LIMIT_REMEDY = (
    "raise it (docker run --pids-limit, podPidsLimit of the kubelet, TasksMax of systemd), or start fewer "
    "workers, loader workers and threads"
)


@dataclass(frozen=True)
class ProcessLimit:
    """The limit of processes and threads in the control group of this process, pids.max."""

    directory: Path
    mount_point: Path

    @classmethod
    def find_own(cls, proc: Path = Path("/proc")) -> ProcessLimit | None:
        """Find the group of this process; None if there is none or it is not visible."""
        found = _find_own_group(proc, "pids")
        return None if found is None else cls(found[0], found[1])

    def read_usage(self) -> tuple[int, int] | None:
        """Return how many run and how many may, in the group or ancestor with the fewest left."""
        usages = []
        for directory in _list_ancestors(self.directory, self.mount_point):
            with contextlib.suppress(OSError, ValueError):  # int("max"): no limit
                files = (directory / name for name in ("pids.current", "pids.max"))
                usages.append(tuple(int(file.read_text()) for file in files))
        return min(((used, limit) for used, limit in usages), key=lambda u: u[1] - u[0], default=None)

    def read_refusals(self) -> int:
        """Return how many processes and threads the kernel has refused."""
        directories = _list_ancestors(self.directory, self.mount_point)
        return max(read_fields(directory / "pids.events").get("max", 0) for directory in directories)

    def describe_shortage(self, workers: int) -> str:
        """Describe why a node with as many workers cannot run, and what to do; empty if it can."""
        used, limit = self.read_usage() or (0, 1 << 60)
        needed = PROCESSES_OF_AGENT + PROCESSES_PER_WORKER * workers
        if limit - used >= needed:
            return ""
        return (
            f"the control group of {used} processes and threads may have {limit} (pids.max), and the node "
            f"needs about {needed} more: {PROCESS_LIMIT_REMEDY}"
        )


def available_memory_bytes(proc: Path = Path("/proc"), group: MemoryCgroup | None = None) -> int:
    """Return the bytes that can be used without swapping or an OOM kill; 0 if unknown."""
    group = group or MemoryCgroup.find_own(proc)
    free = read_fields(proc / "meminfo").get("MemAvailable:", 0) << 10
    used = group.read_usage() if group else None
    return free if used is None else min(free or used[1], max(0, used[1] - used[0]))


def _find_own_group(proc: Path, controller: str) -> tuple[Path, Path, int] | None:
    """Return the directory, the mount point and the cgroup version of this process's group."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        mounts = [_parse_mount(line) for line in (proc / "self/mountinfo").read_text().splitlines()]
        groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
        for _, controllers, path in groups:
            if controller in controllers.split(","):
                found = _find_group_dir(mounts, path, "cgroup", controller)
                if found is not None:
                    return *found, 1
        for number, controllers, path in groups:
            found = (
                _find_group_dir(mounts, path, "cgroup2", "") if (number, controllers) == ("0", "") else None
            )
            # Groups below the one for which the controller counts have none of its files.
            for directory in _list_ancestors(*found) if found is not None else ():
                if found is not None and (directory / f"{controller}.events").exists():
                    return directory, found[1], 2
    return None


def _parse_mount(line: str) -> tuple[str, str, str, str]:
    """Parse a line of mountinfo (proc(5)): root, mount point, file system and its options."""
    before, _, after = line.partition(" - ")
    words, kind = before.split(), after.split()
    return words[3], words[4], kind[0], kind[2]


def _find_group_dir(
    mounts: list[tuple[str, str, str, str]], path: str, kind: str, option: str
) -> tuple[Path, Path] | None:
    """Return the directory of a group and its mount point; in a container the path may be the host's."""
    for root, point, system, options in mounts:
        if system != kind or (option and option not in options.split(",")):
            continue
        inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else "/"
        for found in (Path(point + "/" + inside.lstrip("/")), Path(point)):
            if found.is_dir():
                return found, Path(point)
    return None


def _list_ancestors(directory: Path, mount_point: Path | None) -> list[Path]:
    """List the directory and its parents up to the mount point; only itself if it is not below that."""
    if mount_point is None or not directory.is_relative_to(mount_point):
        return [directory]
    return [directory, *(above for above in directory.parents if above.is_relative_to(mount_point))]


def read_fields(path: Path) -> dict[str, int]:
    """Read lines of a name and a number; empty if unreadable."""
    found = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[1].isdigit():
                found[words[0]] = int(words[1])
    return found


SHARED_MEMORY_DIR = Path("/dev/shm")  # noqa: S108 - only looked at
MIN_SHARED_MEMORY_BYTES = 128 << 20  # by default /dev/shm of a pod or container has 64 MB
MIN_INODES = 16  # the node's own files, two checkpoints, and temporary files
MAX_ENTRIES = 1_000_000  # looked at; a folder of checkpoints has hundreds


def check_shared_memory(path: Path = SHARED_MEMORY_DIR) -> str:
    """Describe what is wrong with /dev/shm and what to do; empty if it is large enough."""
    remedy = (
        "make it larger (in Kubernetes an emptyDir with medium: Memory, docker run --shm-size 1g), or "
        "SIGBUS kills DataLoader workers and NCCL when it is full"
    )
    try:
        total = shutil.disk_usage(path).total
    except OSError:
        return f"there is no {path}: {remedy}"
    if total >= MIN_SHARED_MEMORY_BYTES:
        return ""
    return f"{path} has {total >> 20} MiB, a container's default: {remedy}"


def read_checkpoint_limit(environ: Mapping[str, str]) -> int | None:
    """Return the bytes that the checkpoint volume may hold; None if no limit is set.

    Raises:
        ConfigError: ``ELASTIC_RESUME_CKPT_LIMIT`` is no size.

    """
    text = environ.get(constants.ENV_CKPT_LIMIT, "").strip()
    return parse_kubernetes_quantity(constants.ENV_CKPT_LIMIT, text) if text else None


def free_disk_bytes(path: Path, environ: Mapping[str, str]) -> int:
    """Return the bytes that may still be written below ``path``.

    Raises:
        OSError: ``path`` cannot be read.
        ConfigError: ``ELASTIC_RESUME_CKPT_LIMIT`` is no size.

    """
    free = shutil.disk_usage(path).free
    volume = Path(environ.get(constants.ENV_CKPT_DIR) or path).absolute()
    limit = read_checkpoint_limit(environ)
    # The limit is for the volume only.
    if limit is None or not path.absolute().is_relative_to(volume):
        return free
    return min(free, max(0, limit - used_disk_bytes(volume)))


def describe_missing_inodes(path: Path) -> str:
    """Describe that the file system of ``path`` takes too few new files for a run; empty if it takes them.

    Raises:
        OSError: ``path`` cannot be read.

    """
    found = os.statvfs(path)
    if found.f_files == 0 or found.f_favail >= MIN_INODES:  # 0: it has no such limit
        return ""
    return (
        f"{path} takes {found.f_favail} more files, and a run needs {MIN_INODES} at least (df -i {path}): "
        "remove files there, or give another --ckpt-dir"
    )


def used_disk_bytes(path: Path) -> int:
    """Return the bytes that files below ``path`` take on the disk; hard links count once."""
    total, seen, entries = 0, set(), 0
    for folder, _, files in os.walk(path):
        for name in files:
            entries += 1
            if entries > MAX_ENTRIES:
                return total
            with contextlib.suppress(OSError):  # the file was just removed
                found = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - a million Paths are slow
                if stat.S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    total += found.st_blocks * 512
    return total
