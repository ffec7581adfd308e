"""A directory has one owner where flock(2) fails or is granted to everybody."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_resume import constants
from elastic_resume.testing import fork_server
from tests.support import answered_call
from tests.support.paths import ROOT
from tests.support.processes import wait_for

pytestmark = pytest.mark.slow

ANSWERS = ["0", "ENOSYS", "ENOLCK"]
TRIES = 200 if "ELASTIC_RESUME_SOAK_KILLS" in os.environ else 8
LEASE_S = 3.0
# Claims, then does what its standard input says: writes a file, or forks. Its lease is short.
OWNER = f"""
import logging, os, sys
from pathlib import Path
from elastic_resume.checkpoint import dir_lock
from elastic_resume.checkpoint.atomic_io import DISK
from elastic_resume.checkpoint.node_dir import NodeDir
logging.basicConfig(level=logging.INFO)
dir_lock.LEASE_S, dir_lock.HEARTBEAT_S, dir_lock.SETTLE_S = {LEASE_S}, 0.5, 0.2
node = NodeDir.claim(Path(sys.argv[1]), "job", "a", timeout_s=float(sys.argv[2]))
print("held", flush=True)
for line in sys.stdin:
    if line == "write\\n":
        DISK.write_atomic(node.path / "file", str(os.getpid()).encode())
    elif line == "fork\\n":
        if (child := os.fork()) == 0:
            node.release()
            os._exit(0)
        os.waitpid(child, 0)
    print("done", flush=True)
node.release()
"""


class Owner(subprocess.Popen[str]):
    """A process that claims the directory, for which flock has another answer."""

    def __init__(self, directory: Path, answer: str, timeout_s: float = 0.0, host: str = "") -> None:
        flags = ["--uts", "--pid", "--fork", "--kill-child"]  # nobody sees each other's processes
        wrapper = ["unshare", *flags, "sh", "-c", f'hostname {host}; exec "$@"', "sh"] if host else []
        filtered = [sys.executable, answered_call.__file__, "flock", answer, sys.executable, "-c", OWNER]
        super().__init__(
            [*wrapper, *filtered, str(directory), str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    @property
    def itself(self) -> psutil.Process:
        """The process in its own namespace of process numbers."""
        return psutil.Process(self.pid).children()[0]

    def read(self) -> str:
        """Return the next line; empty if the process has ended."""
        assert self.stdout
        return self.stdout.readline().strip()

    def do(self, what: str) -> str:
        """Have the process do something; return its answer."""
        assert self.stdin
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(what + "\n")
            self.stdin.flush()
        return self.read()

    def end(self) -> str:
        """Let it release the directory; return what it has written to stderr."""
        return self.communicate(timeout=60)[1]


@pytest.fixture(params=ANSWERS)
def owner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Owner]:
    """A process that owns the directory."""
    with Owner(tmp_path, request.param) as process:
        assert process.read() == "held", process.end()
        yield process
        process.kill()


def claim(directory: Path, answer: str = "0", timeout_s: float = 0.0) -> str:
    """Return the error of a process that claims the directory; empty if it owned it."""
    with Owner(directory, answer, timeout_s) as process:
        errors = process.end()
    return errors if process.returncode else ""


def test_second_process_is_refused_until_the_first_releases(owner: Owner, tmp_path: Path) -> None:
    """It sees that the lease is renewed, and names the owner. A fork of the owner releases nothing."""
    assert owner.do("fork") == "done"
    error = claim(tmp_path)
    assert "NodeLockedError" in error
    assert f"held by process {owner.pid} on host {os.uname().nodename} since " in error
    assert owner.do("write") == "done"
    owner.end()
    assert not claim(tmp_path)


def test_directory_of_a_killed_owner_is_taken_over(owner: Owner, tmp_path: Path) -> None:
    """At once, since the owner ran on this machine: no owner that may live is waited for."""
    owner.kill()
    owner.wait()
    with Owner(tmp_path, "0") as process:
        assert process.read() == "held"
        errors = process.end()
    assert "waiting up to" not in errors


def test_directory_of_a_reused_process_number_is_taken_over(owner: Owner, tmp_path: Path) -> None:
    """The number in the file is alive again, as another process."""
    owner.kill()
    owner.wait()
    lease = tmp_path / "job" / "a" / constants.OWNER_LEASE_FILE
    with subprocess.Popen(["sleep", "60"]) as other:
        lease.write_text(json.dumps(json.loads(lease.read_text()) | {"pid": other.pid}))
        error = claim(tmp_path)
        other.kill()
    assert not error


@pytest.mark.skipif(os.getuid() != 0, reason="another host name needs root")
def test_directory_of_a_lost_machine_is_taken_over_after_its_lease(tmp_path: Path) -> None:
    """Nobody can know that its process has ended; a living one there is not taken over."""
    with Owner(tmp_path, "0", host="other-machine") as first:
        assert first.read() == "held", first.end()
        error = claim(tmp_path)
        assert "held by process 1 on host other-machine" in error
        first.itself.kill()
    with Owner(tmp_path, "0") as process:
        assert process.read() == "held"
        errors = process.end()
    assert "waiting up to" in errors


@pytest.fixture
def suspended(tmp_path: Path) -> Iterator[Owner]:
    """An owner on another machine that is suspended."""
    if os.getuid() != 0:
        pytest.skip("another machine's names need root")
    with Owner(tmp_path, "0", host="other-machine") as process:
        assert process.read() == "held", process.end()
        process.itself.suspend()
        wait_for(lambda: process.itself.status() == psutil.STATUS_STOPPED, "the owner to stop")
        yield process
        process.kill()


def test_suspended_owner_that_was_replaced_ends_before_it_writes(suspended: Owner, tmp_path: Path) -> None:
    """Its next rename finds the other's lease."""
    with Owner(tmp_path, "0") as second:
        assert second.read() == "held"
        assert second.do("write") == "done"
        assert suspended.stdin
        suspended.stdin.write("write\n" * 100)
        suspended.stdin.flush()
        suspended.itself.resume()
        errors = suspended.communicate(timeout=60)[1]
        assert suspended.returncode == constants.EXIT_MACHINE_ERROR
        assert (tmp_path / "job" / "a" / "file").read_text() == str(second.pid)
    assert f"a belongs to another process now, or its {constants.OWNER_LEASE_FILE} was removed" in errors


def test_suspended_owner_ends_though_its_successor_has_gone(suspended: Owner, tmp_path: Path) -> None:
    """The directory is not as it was. A file that its successor or a person removed does not come back."""
    assert not claim(tmp_path)
    suspended.itself.resume()
    assert suspended.do("write") == ""
    suspended.communicate(timeout=60)
    assert suspended.returncode == constants.EXIT_MACHINE_ERROR
    assert not (tmp_path / "job" / "a" / "file").exists()


def test_stopped_owner_of_this_machine_keeps_its_directory(owner: Owner, tmp_path: Path) -> None:
    """Its process lives."""
    os.kill(owner.pid, signal.SIGSTOP)
    time.sleep(LEASE_S)
    assert "NodeLockedError" in claim(tmp_path)
    os.kill(owner.pid, signal.SIGCONT)
    assert owner.do("write") == "done"


@pytest.mark.parametrize("content", ["", "{", '{"boot": 3}'])
def test_lease_that_a_crash_has_cut_is_taken_over(content: str, tmp_path: Path) -> None:
    """Nobody renews it."""
    directory = tmp_path / "job" / "a"
    directory.mkdir(parents=True)
    (directory / constants.OWNER_LEASE_FILE).write_text(content)
    with Owner(tmp_path, "0") as process:
        assert process.read() == "held"
        errors = process.end()
    assert "waiting up to" in errors


def test_no_two_owners_whoever_is_killed(tmp_path: Path) -> None:
    """Four processes want the directory; the one that has it is killed, or releases it."""
    chance = random.Random(1)
    waiting = [Owner(tmp_path, "0", timeout_s=120) for _ in range(4)]
    try:
        for _ in range(TRIES):
            wait_for(lambda: any(_has_line(process) for process in waiting), "an owner", timeout_s=60)
            time.sleep(chance.random() * 0.2)  # for a second one to come
            owners = [process for process in waiting if _has_line(process)]
            assert len(owners) == 1
            assert owners[0].read() == "held"
            assert owners[0].do("write") == "done"
            if chance.random() < 0.7:
                owners[0].kill()
                owners[0].communicate()
            else:
                owners[0].end()
            waiting.remove(owners[0])
            waiting.append(Owner(tmp_path, "0", timeout_s=120))
    finally:
        for process in waiting:
            process.kill()
            process.communicate()


def _has_line(process: Owner) -> bool:
    assert process.stdout
    return bool(select.select([process.stdout], [], [], 0)[0])


@pytest.mark.cluster
def test_second_job_on_the_directory_is_refused(tmp_path: Path) -> None:
    """As a user meets it: the command ends with 74 and names the job that runs."""
    filtered = [sys.executable, answered_call.__file__, "flock", "0", "-m", "elastic_resume"]
    job = ["--ckpt-dir", str(tmp_path), "--rdzv-id", "job", "--no-python", "sleep", "600"]

    def start(output: Path) -> fork_server.AgentProcess:
        with output.open("wb") as file:
            forked = fork_server.start([*filtered, "run", *job], os.environ, file)
        assert forked is not None
        return forked

    first = start(tmp_path / "first.log")
    wait_for(lambda: list(tmp_path.glob("job/*/lock-owner.json")), "the first job", timeout_s=60)
    second = start(tmp_path / "second.log")
    assert second.wait(120) == constants.EXIT_MACHINE_ERROR
    first.terminate()
    first.wait(60)
    held = f"is held by process {first.pid} on host "
    assert held in (tmp_path / "second.log").read_text()
    owns = "flock(2) grants a lock twice, so this process owns it by the file owner-lease"
    assert owns in (tmp_path / "first.log").read_text()
