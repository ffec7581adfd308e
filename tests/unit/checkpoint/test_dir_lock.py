"""Which mounts keep locks to one machine, and the guards of a directory's owner."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from elastic_resume import constants
from elastic_resume.checkpoint import atomic_io, dir_lock
from elastic_resume.checkpoint.dir_lock import OwnerLease, find_local_lock_option
from elastic_resume.errors import MachineError

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


# ---- the guards of an owner, each met by the interleaving that it is for ---------------------------------


FOREIGN = '{"token": "other", "pid": 1, "start": "1", "machine": "another"}'


@pytest.fixture
def lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnerLease]:
    """Return the lease of an empty directory; whatever happens, this process renews it no more."""
    monkeypatch.setattr(dir_lock, "SETTLE_S", 0.0)
    made = OwnerLease(tmp_path)
    yield made
    made.release()


def test_directory_without_an_owner_is_taken_at_once(lease: OwnerLease, tmp_path: Path) -> None:
    """Nobody is waited for."""
    assert lease.try_acquire()
    lease.release()
    assert list(tmp_path.iterdir()) == []


def test_owner_that_came_before_the_rename_keeps_the_directory(
    lease: OwnerLease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has acquired between this process's look and its rename. Nothing is left beside its file."""
    make_name = atomic_io.temporary_name

    def make_name_later(name: str) -> str:
        (tmp_path / constants.OWNER_LEASE_FILE).write_text(FOREIGN)
        return make_name(name)

    monkeypatch.setattr(atomic_io, "temporary_name", make_name_later)
    assert not lease.try_acquire()
    assert [path.read_text() for path in tmp_path.iterdir()] == [FOREIGN]


def test_of_two_that_take_the_directory_the_last_one_owns_it(
    lease: OwnerLease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has renamed its file while this process let them settle. It gives nothing up."""
    path = tmp_path / constants.OWNER_LEASE_FILE
    monkeypatch.setattr(time, "sleep", lambda _: path.write_text(FOREIGN))
    assert not lease.try_acquire()
    assert tmp_path not in atomic_io.rename_checks
    lease.release()
    assert path.read_text() == FOREIGN


@pytest.mark.parametrize("code", [0, errno.ENOLCK])
def test_released_directory_is_free(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor is closed, and an owner's lease is removed."""
    monkeypatch.setattr(dir_lock, "SETTLE_S", 0.0)
    if code:
        monkeypatch.setattr(fcntl, "flock", fail_with(code))
    lock = dir_lock.acquire(tmp_path, 0)
    assert lock is not None
    assert dir_lock.is_owned(tmp_path)
    assert (tmp_path / constants.OWNER_LEASE_FILE).exists() == bool(code)
    lock.release()
    lock.release()
    assert not dir_lock.is_owned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [constants.LOCK_FILE]
    assert str(tmp_path / constants.LOCK_FILE) not in [file.path for file in psutil.Process().open_files()]


def fail_with(code: int) -> Callable[..., None]:
    """Return a system call that a file system answers with an error."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_lock_that_fails_for_another_reason_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken disk is no file system without locks."""
    monkeypatch.setattr(fcntl, "flock", fail_with(errno.EIO))
    with pytest.raises(MachineError, match="Input/output error"):
        dir_lock.acquire(tmp_path, 0)
    assert not dir_lock.is_owned(tmp_path)


def test_lock_of_one_machine_is_told_with_its_mount_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's mounts have no such option, so the search is answered for it."""
    monkeypatch.setattr(dir_lock, "find_local_lock_option", lambda *_: "nobrl")
    with open(tmp_path / "lock", "w+b") as file:
        problem = dir_lock.find_problem(file.fileno(), tmp_path / "lock")
    assert problem == "the mount option nobrl makes a lock count on one machine only"
