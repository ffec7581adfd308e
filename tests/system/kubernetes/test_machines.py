"""Simulated machines: what a process inside sees, and what is left when one dies or its maker does."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_resume.errors import MachineError, UsageError
from elastic_resume.machine import MemoryCgroup
from elastic_resume.testing import fork_server
from elastic_resume.testing.virtual_network import unavailable_reason
from tests.support import namespaces
from tests.support.machine_cluster import MachineBackend
from tests.support.machines import DISKS, MB, Machines
from tests.support.processes import wait_for

pytestmark = pytest.mark.cluster

LISTEN = """
import socket, sys
made = socket.create_server((sys.argv[1], 9000))
print("ready", flush=True)
line = made.accept()[0]
line.send(b".")
line.recv(1)
"""
ASK = """
import socket, sys
line = socket.create_connection((sys.argv[1], 9000))
line.recv(1)  # who has not been accepted yet is refused in the end
print("ready", flush=True)
line.settimeout(float(sys.argv[2]))
try:
    print(line.recv(1))
except TimeoutError:
    print("silence")
"""
OWNER = """
import signal, sys
from tests.support.machines import Machines
machines = Machines()
machines.boot(memory_bytes=64 << 20)
ups = machines._running_machines.values()
print(machines.run(0, ["sleep", "600"]).pid, *(up.init_process.pid for up in ups), flush=True)
print(*(up.memory_limit.group_path for up in ups), flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """Three machines, for all tests of this file."""
    why = unavailable_reason()
    if why and "CI" not in os.environ:
        pytest.skip(why)
    with Machines() as made:
        made.boot()
        yield made


def said(machines: Machines, index: int, *argv: str) -> str:
    """What a command prints on a machine."""
    with machines.run(index, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        return process.communicate(timeout=60)[0].decode().strip()


def up(machines: Machines, index: int) -> None:
    """Boot a machine if it is down."""
    if not machines.is_up(index):
        machines.boot(index)


def test_a_machine_has_a_name_processes_and_disks_of_its_own(machines: Machines) -> None:
    """And the host's files apart from these, under the same names; this package can be imported there."""
    look = "hostname; echo $$; ls /scratch | wc -l; df --output=size /dev/shm /scratch | tail -n 2; cat $0"
    name, pid, files, shm, scratch, *rest = said(machines, 1, "sh", "-c", look, "/etc/os-release").split("\n")
    assert (name, files, int(shm), int(scratch)) == ("n1", "0", 64 << 10, 256 << 10)
    assert int(pid) < 100
    assert rest == Path("/etc/os-release").read_text().strip().split("\n")
    ask = "import elastic_resume, socket; print(socket.gethostbyname('n2'), socket.gethostbyname('n1'))"
    assert said(machines, 1, sys.executable, "-c", ask) == f"{machines.address(2)} {machines.address(1)}"


def test_the_id_that_is_given_back_is_the_one_to_signal(machines: Machines) -> None:
    """Its exit code too is the command's own, and its folder is the caller's."""
    with machines.run(0, ["sh", "-c", "pwd; kill -9 $$"], stdout=subprocess.PIPE) as process:
        assert process.communicate()[0].decode().strip() == str(Path.cwd())
    assert process.returncode == -signal.SIGKILL
    with machines.run(0, ["sleep", "600"]) as process:
        process.terminate()
    assert process.returncode == -signal.SIGTERM


def test_nothing_is_mounted_or_named_on_the_host(machines: Machines) -> None:
    """The host's mounts and name are as before, and what a machine writes is nowhere on it."""
    said(
        machines, 0, "sh", "-c", "mkdir /own; touch /own/of-a-machine /tmp/of-a-machine /scratch/of-a-machine"
    )
    assert machines.path(0, "/scratch/of-a-machine").exists()
    assert not any((Path(each) / "of-a-machine").exists() for each in ("/own", *DISKS))
    own_root = f"/proc/{machines._running_machines[0].init_process.pid}/"
    assert own_root not in Path("/proc/self/mountinfo").read_text()
    assert socket.gethostname() not in {"n0", "n1", "n2"}


def test_orphans_are_reaped(machines: Machines) -> None:
    """Nobody else does it there."""
    said(machines, 0, "sh", "-c", "(setsid true &)")
    first = psutil.Process(machines._running_machines[0].init_process.pid)
    wait_for(lambda: not first.children(), "no child is left to process 1")
    assert first.is_running()


@pytest.mark.parametrize(("how", "heard"), [("crash", "b''"), ("poweroff", "silence")])
def test_peers_of_a_crashed_machine_hear_of_it_and_those_of_one_without_power_do_not(
    machines: Machines, how: str, heard: str
) -> None:
    """Its processes are dead either way, and its disks are empty when it boots."""
    up(machines, 2)
    machines.path(2, "/scratch/file").touch()
    python = [sys.executable, "-S", "-u", "-c"]
    patience = "1" if heard == "silence" else "60"
    with machines.run(2, [*python, LISTEN, machines.address(2)], stdout=subprocess.PIPE) as there:
        assert there.stdout is not None
        there.stdout.readline()
        ask = [*python, ASK, machines.name(2), patience]
        with machines.run(0, ask, stdout=subprocess.PIPE) as here:
            assert here.stdout is not None
            here.stdout.readline()
            getattr(machines, how)(2)
            assert there.poll() == -signal.SIGKILL
            assert here.stdout.readline().decode().strip() == heard
    with pytest.raises(UsageError, match="is down"):
        machines.run(2, ["true"])
    machines.boot(2)
    assert said(machines, 2, "ls", "/scratch") == ""


def test_a_machine_may_come_back_with_another_address_which_all_learn(machines: Machines) -> None:
    """Under its name; unless a machine was told names of its own."""
    up(machines, 2)
    machines.crash(2)
    former = machines.address(2)
    machines.set_known_names(1, {"n9": "10.9.9.9"})
    machines.boot(2, new_address=True)
    assert machines.address(2) != former
    assert said(machines, 0, "getent", "hosts", "n2").split() == [machines.address(2), "n2"]
    connect = "import socket; socket.create_connection(('n2', 9000), 5)"
    assert "refused" in said(machines, 0, sys.executable, "-S", "-c", connect)  # by n2: a stranger is silent
    assert said(machines, 1, "getent", "hosts", "n2") == ""
    assert said(machines, 1, "getent", "hosts", "n9").split() == ["10.9.9.9", "n9"]
    machines.set_known_names(
        1, {machines.name(each): machines.address(each) for each in range(3)}
    )  # for others


def test_what_would_have_to_be_made_on_the_hosts_disk_is_refused() -> None:
    """A folder below one of the host's; the error says which."""
    disks = {"/usr/nothing/here": MB}
    with Machines(["n0"], disks=disks) as one, pytest.raises(MachineError, match="/usr/nothing/here"):
        one.boot()


def test_when_the_owner_is_killed_its_machines_end() -> None:
    """The kernel ends all processes; the next owner removes the control groups."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        inside = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(inside) == 4
        groups = [Path(word) for word in owner.stdout.readline().split()]
        assert [group.is_dir() for group in groups] == [True] * 3
        owner.kill()
        for each in inside:
            fork_server.wait_for_exit(each)
    for each in inside:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert each.status() == psutil.STATUS_ZOMBIE
    namespaces.remove_stale_groups()
    assert not any(group.exists() for group in groups)


def test_of_a_machine_that_does_not_start_no_control_group_is_left() -> None:
    """Its memory is too small for its first process; the other one of that start ends with all."""
    own = MemoryCgroup.find_own()
    assert own is not None
    with Machines(["n0", "n1"]) as two:
        with pytest.raises(MachineError, match="n0 does not start"):
            two.boot(memory_bytes=4096)
        assert not list(own.directory.glob(f"*-{os.getpid()}-*"))


def test_a_machine_whose_disk_cannot_be_put_in_place_is_down(tmp_path: Path) -> None:
    """It would write to the host's disk in the place of its own."""
    with contextlib.closing(MachineBackend(tmp_path, 1)) as ground:
        ground.prepare_disk(0, tmp_path / "n0")
        ground.disk(0).close()
        for _ in range(2):
            with pytest.raises(UsageError, match="closed"):
                ground.boot([0])
        assert ground.processes(0) == []
