"""A real Slurm on simulated machines: a controller, three nodes, two partitions, up in about a second.

The controller has a machine of its own, so that any node can lose its power. Everything lies in one
directory, which all machines see, and nothing under /etc is read or written: commands get ``SLURM_CONF``.
What the host keeps is a control group for each node, which Slurm needs in order to find a job's processes;
`close` removes them, and those that a cluster left whose maker was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from elastic_resume.testing.virtual_network import unavailable_reason as hosts_available
from tests.support.agent_fork_server import FREEZER, ShimAgentServer
from tests.support.machines import Machines
from tests.support.paths import ROOT

T = TypeVar("T")

NODES = (1, 2, 3)
"""Indices of the machines that are nodes; machine 0 is the controller's."""
CONTROLLER = 0
POLL_S = 0.2  # each poll runs a Slurm command or reads all events
TIMEOUT_S = 60.0
TOOLS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}

# Times are short, so that what takes minutes on a site takes seconds; nothing else is unlike a usual site.
CONF = """
ClusterName=lab
SlurmctldHost={controller}
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldDebug=verbose
SlurmdDebug=debug
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
JobRequeue=1
ReturnToService=2
SlurmdTimeout=6
SlurmctldTimeout=10
KillWait=5
MinJobAge=300
MessageTimeout=5
TCPTimeout=2
UnkillableStepTimeout=30
NodeName={prefix}[1-3] CPUs=4 RealMemory=1000
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
CGROUP_CONF = """
CgroupMountpoint=/sys/fs/cgroup
CgroupPlugin=cgroup/v1
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace=no
"""


def unavailable_reason() -> str:
    """Why no Slurm can be brought up here, in words; empty when it can."""
    missing = sorted({package for tool, package in TOOLS.items() if _find_tool(tool) is None})
    if missing:
        return f"no Slurm on this machine: apt-get install {' '.join(missing)}"
    return hosts_available()


class SlurmTimeoutError(AssertionError):
    """What was waited for did not happen; the text ends with what the cluster has printed last."""


class SlurmCluster(contextlib.AbstractContextManager["SlurmCluster"]):
    """Use it as a context manager, or call `close`."""

    def __init__(self, directory: Path) -> None:
        """Bring it up; ``directory`` is to be empty, and its path short enough for sockets."""
        self.directory = directory
        _remove_stale_groups()
        self.prefix = f"p{os.getpid()}n"  # Slurm names the nodes' control groups by it
        names = ["controller", *(f"{self.prefix}{index}" for index in NODES)]
        self.machines = Machines(names, bind={str(directory): directory})
        # Nodes of Slurm fall silent when they die: other tests' time for that is too long (conftest).
        own = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("ELASTIC_RESUME_", "TORCHELASTIC_"))
        }
        self.env = {**own, "SLURM_CONF": str(directory / "slurm.conf")}
        self._agent_server: ShimAgentServer | None = None
        try:
            self._configure()
            self.machines.boot()
            self._start_munge()
            self._start_daemon(CONTROLLER, "slurmctld", "slurmctld", "-D")
            for index in NODES:
                self._start_node(index)
            self._use_forked_agents()
            self.wait(lambda: self.idle_node_count() == len(NODES), "three idle nodes")
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of it, and remove what it has left in the host's control groups."""
        self.machines.close()
        if self._agent_server is not None:
            self._agent_server.close()
        _remove_groups(self.prefix)

    # ---- asking --------------------------------------------------------------------------------------

    def command(
        self, *argv: str, check: bool = True, env: Mapping[str, str] | None = None, timeout_s: int = 30
    ) -> str:
        """What a command prints on the controller's machine."""
        with self.machines.run(
            CONTROLLER,
            ["timeout", str(timeout_s), *argv],
            env={**self.env, **(env or {})},
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            said = process.communicate()[0].decode()
        if check and process.returncode:
            raise AssertionError(f"{argv} ended with {process.returncode}: {said}")
        return said.strip()

    def sbatch(self, *argv: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a script; give the job's id."""
        return self.command("sbatch", "--parsable", *argv, env=env).split(";")[0]

    def job_info(self, job: str) -> dict[str, str]:
        """All that the controller says of a job, or of an element in array form."""
        said = self.command("scontrol", "show", "job", "-o", job)
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def job_state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, ..."""
        return self.job_info(job)["JobState"]

    def idle_node_count(self) -> int:
        """How many nodes have nothing to do."""
        said = self.command("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D", check=False)
        return int(said) if said.isdigit() else 0

    def index(self, name: str) -> int:
        """Which machine a node is."""
        return int(name.removeprefix(self.prefix))

    def wait(self, condition: Callable[[], T | None], description: str, timeout_s: float = TIMEOUT_S) -> T:
        """Call ``look`` until it gives something true, and return that."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = condition()
            if found:
                return found
            if time.monotonic() > deadline:
                raise SlurmTimeoutError(f"{description}: {timeout_s:.0f} s went by.\n{self.log_tails()}")
            time.sleep(POLL_S)

    def log_tails(self) -> str:
        """What daemons and jobs have printed last."""
        logs = sorted(each for end in ("ctld.log", ".out") for each in self.directory.glob(f"*{end}"))
        tails = [f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs]
        return "\n".join(
            [self.command("squeue", "-a", check=False), self.command("sinfo", check=False), *tails]
        )

    # ---- what befalls it -----------------------------------------------------------------------------

    def start_now(self, job: str) -> None:
        """Spare a requeued job the two minutes for which Slurm holds it back."""
        time.sleep(1.1)  # slurmd refuses a start in the second in which it has ended the job
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now")

    def boot(self, *indices: int) -> None:
        """Boot nodes that are down, with empty disks."""
        for index in indices:
            self.machines.boot(index)
            self._start_node(index)

    # ---- inside --------------------------------------------------------------------------------------

    def _configure(self) -> None:
        munge = self.directory / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o600)
        (self.directory / "state").mkdir()
        conf = CONF.format(
            controller=self.machines.name(CONTROLLER),
            directory=self.directory,
            prefix=self.prefix,
            proctrack="cgroup" if FREEZER.is_dir() else "linuxproc",
        )
        (self.directory / "slurm.conf").write_text(conf)
        (self.directory / "cgroup.conf").write_text(CGROUP_CONF)

    def _start_munge(self) -> None:
        munge = self.directory / "munge"
        files = [f"--{what}-file={munge / what}" for what in ("key", "pid", "log", "seed")]
        socket = munge / "socket"
        self._start_daemon(
            CONTROLLER,
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--socket={socket}",
            "--num-threads=4",
            *files,
        )
        self.wait(socket.exists, "munged's socket")

    def _start_node(self, index: int) -> None:
        name = self.machines.name(index)
        self._start_daemon(index, f"slurmd.{name}", "slurmd", "-D", "-N", name)

    def _use_forked_agents(self) -> None:
        """Have jobs find the `elastic-resume` that is forked, where Slurm can tell whose it is."""
        real = Path(sys.executable).parent
        self.env["PATH"] = f"{real}:{self.env['PATH']}"
        if FREEZER.is_dir():
            self._agent_server = ShimAgentServer(self.directory, {**self.env, "OMP_NUM_THREADS": "1"})
            self.env["PATH"] = f"{self._agent_server.bin_dir}:{self.env['PATH']}"

    def _start_daemon(self, index: int, log: str, tool: str, *argv: str) -> subprocess.Popen[bytes]:
        with open(self.directory / f"{log}.log", "ab") as output:
            return self.machines.run(
                index,
                [str(_find_tool(tool)), *argv],
                env={**self.env, "PYTHONPATH": str(ROOT)},
                cwd=self.directory,
                stdout=output,
                stderr=subprocess.STDOUT,
            )


def _remove_groups(prefix: str) -> None:
    """Remove the control groups of nodes whose names begin so; none has a process."""
    for top in FREEZER.glob(f"**/slurm_{prefix}[0-9]"):
        for group in sorted((each for each in top.rglob("*") if each.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()
        with contextlib.suppress(OSError):
            top.rmdir()


def _remove_stale_groups() -> None:
    for top in FREEZER.glob("**/slurm_p*n[0-9]"):
        maker = re.fullmatch(r"slurm_(p(\d+)n)\d", top.name)
        if maker and not Path("/proc", maker[2]).exists():
            _remove_groups(maker[1])


def _find_tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
