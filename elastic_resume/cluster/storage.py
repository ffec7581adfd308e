"""How much a folder may still take, where its file system does not tell: /dev/shm, and volumes of a pod.

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
from pathlib import Path

from elastic_resume import contract
from elastic_resume.cluster import kubernetes

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
    text = environ.get(contract.ENV_CKPT_LIMIT, "").strip()
    return kubernetes.size_bytes(text, contract.ENV_CKPT_LIMIT) if text else None


def free(path: Path, environ: Mapping[str, str]) -> int:
    """Bytes that may still be written below ``path``.

    Raises:
        OSError: ``path`` cannot be looked at.
        ConfigError: the limit that the environment tells is no size.

    """
    left = shutil.disk_usage(path).free
    volume = Path(environ.get(contract.ENV_CKPT_DIR) or path).absolute()
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
