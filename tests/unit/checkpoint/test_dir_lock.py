"""Which mounts keep locks to one machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_resume.checkpoint.dir_lock import find_local_lock_option

ROOT = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro"
LUSTRE = "90 22 0:51 / /scratch rw,nosuid - lustre 10.0.0.1@tcp:/scratch rw,checksum,{},user_xattr"
NFS = "91 22 0:52 /a /home rw shared:7 master:1 - nfs4 server:/home rw,vers=4.2,local_lock={},addr=10.0.0.2"
CIFS = r"92 22 0:53 / /mnt/a\040b rw - cifs //server/share rw,vers=3.1.1,{},soft"


@pytest.mark.parametrize(
    ("line", "minor", "option"),
    [
        (LUSTRE.format("flock"), 51, ""),
        (LUSTRE.format("localflock"), 51, "localflock"),
        (LUSTRE.format("localflock"), 52, ""),
        (NFS.format("none"), 52, ""),
        (NFS.format("posix"), 52, ""),
        (NFS.format("flock"), 52, "local_lock=flock"),
        (NFS.format("all"), 52, "local_lock=all"),
        (CIFS.format("nobrl"), 53, "nobrl"),
        (CIFS.format("brl"), 53, ""),
        ("91 22 0:52 / /local_lock=all rw - nfs4 server:/nobrl rw,local_lock=none", 52, ""),
    ],
)
def test_option_of_the_mount_is_found(line: str, minor: int, option: str) -> None:
    """Of this device alone, and among the options of its file system."""
    assert find_local_lock_option([ROOT, line], os.makedev(0, minor)) == option


def test_local_disks_have_none() -> None:
    """Nor is one found in this machine's own mounts."""
    with open("/proc/self/mountinfo") as mounts:
        assert find_local_lock_option(mounts, Path(__file__).stat().st_dev) == ""
