"""Which mounts keep locks to one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_resume import constants
from elastic_resume.checkpoint import dir_lock
from elastic_resume.checkpoint.dir_lock import OwnerLease, find_local_lock_option

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


@pytest.mark.parametrize(
    ("changes", "is_owner_alive"),
    [
        ({}, True),
        ({"start": "1"}, False),  # another process has the number
        ({"pid": 1 << 22}, False),
        ({"start": ""}, True),  # nobody can see when it started
    ],
)
def test_owner_of_this_machine_is_judged_by_its_process(
    changes: dict[str, object], is_owner_alive: bool, tmp_path: Path
) -> None:
    """Only one that has ended for certain loses the directory at once."""
    own = os.getpid()
    record = {
        "token": "x",
        "pid": own,
        "start": dir_lock._read_start(own),
        "machine": dir_lock._describe_machine(),
    }
    (tmp_path / constants.OWNER_LEASE_FILE).write_text(json.dumps(record | changes))
    lease = OwnerLease(tmp_path)
    assert lease.try_acquire() is not is_owner_alive
    assert lease.is_owner_alive is is_owner_alive
    lease.release()


def test_owner_of_a_machine_that_is_unknown_has_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines that hide what they are must not be taken for one."""
    monkeypatch.setattr(dir_lock, "_describe_machine", lambda: "")
    record = {"token": "x", "pid": 1 << 22, "start": "1", "machine": ""}
    (tmp_path / constants.OWNER_LEASE_FILE).write_text(json.dumps(record))
    assert not OwnerLease(tmp_path).try_acquire()


@pytest.mark.skipif(os.getuid() != 0, reason="another user needs root")
def test_process_of_another_user_has_not_ended() -> None:
    """A /proc mounted with hidepid shows nothing of it."""
    code = (
        "import os, sys; from elastic_resume.checkpoint import dir_lock\n"
        "os.setuid(65534); dir_lock._read_start = lambda pid: ''\n"
        "sys.exit(dir_lock._has_ended(1, '7') or not dir_lock._has_ended(1 << 22, '7'))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
