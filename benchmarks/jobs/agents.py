"""Start and kill the compared systems, each on three local nodes."""

# ruff: noqa: D102  see the base class

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import psutil

from elastic_resume.testing import fork_server
from elastic_resume.testing.cluster import Cluster

SCRIPT = Path(__file__).with_name("steps.py")
OURS = ("in-process", "ours")
NODES, MIN_NODES = 3, 2
# With 2 attempts a killed node is never let in again (waited for 300 s, torch 2.13).
TUNED_CONF = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Work:
    """The nodes' work: the model, sleep per step, when to save, the fewest nodes, and the set-up."""

    model: str = "64"  # see steps.py
    sleep_s: float = 0.02
    stock_saves_every: int = 1
    flags: tuple[str, ...] = ("--save-every", "1")  # of ours
    min_nodes: int = MIN_NODES
    setup_s: float = 0.0  # of each process, before it resumes

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of steps.py."""
        return [self.model, repr(self.sleep_s), str(self.stock_saves_every), repr(self.setup_s)]


class Job(ABC):
    """One system's job. It writes the workers' marks and the agents' output into ``directory``."""

    survivors_keep_process = False

    def __init__(self, directory: Path, work: Work) -> None:
        self.directory = directory
        self.work = work

    @abstractmethod
    def start(self, index: int) -> None:
        """Start a node."""

    @abstractmethod
    def agent(self, index: int) -> fork_server.AgentProcess:
        """Return the agent of a started node."""

    @abstractmethod
    def host(self) -> int:
        """Return the index of the node that hosts the rendezvous, or leads it."""

    def processes(self, index: int) -> list[psutil.Process]:
        """List a node's agent and all of its descendants."""
        agent = psutil.Process(self.agent(index).pid)
        return [agent, *agent.children(recursive=True)]

    def codes(self) -> list[int | None]:
        """List each agent's exit code; None while it runs."""
        return [self.agent(index).poll() for index in range(NODES)]

    def stop(self) -> None:
        """Kill every node, and wait for all processes to end."""
        for index in range(NODES):
            if self.agent(index).poll() is None:
                reap_processes(kill_processes(self.processes(index)))
                self.agent(index).wait()


class Ours(Job):
    """`elastic-resume run` on simulated nodes; ``system`` is "ours" or "in-process"."""

    def __init__(self, directory: Path, work: Work, system: str, flags: list[str]) -> None:
        super().__init__(directory, work)
        self.survivors_keep_process = system == "in-process"
        # The first resume computes steps again; docs/benchmarks.md has that cost alone.
        flags = ["--prove", "off", *work.flags, *flags]
        self._cluster = Cluster(
            directory,
            nodes=NODES,
            min_nodes=work.min_nodes,
            max_nodes=NODES,
            run_id="bench",
            flags=flags,
            fresh=True,
        )
        self._cluster.start(SCRIPT, system, str(directory), *work.arguments)

    def start(self, index: int) -> None:
        self._cluster.start_node(index)

    def agent(self, index: int) -> fork_server.AgentProcess:
        agent = self._cluster.nodes[index].agent
        if agent is None:
            raise RuntimeError(f"n{index} was not started.")
        return agent

    def host(self) -> int:
        leading = [event for event in self._cluster.events("rendezvous") if event["what"] == "leading"]
        return int(str(leading[-1]["node"]).removeprefix("n"))


class Stock(Job):
    """Torchrun with c10d. n0 hosts the store explicitly: on loopback every node could be the host."""

    def __init__(
        self, directory: Path, work: Work, conf: dict[str, int], env: dict[str, str], way: str = "stock"
    ) -> None:
        super().__init__(directory, work)
        self._way = way
        self._conf = conf
        self._env = env
        self._network = f"127.{1 + secrets.randbelow(253)}.{secrets.randbelow(256)}"
        self._port = _free_port()
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        for index in range(NODES):
            self.start(index)
            if index == 0:
                self._wait_for_store()

    def start(self, index: int) -> None:
        conf = {"is_host": int(index == 0), **self._conf}
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{self.work.min_nodes}:{NODES}"),
            *("--nproc-per-node", "1", "--max-restarts", "1000000", "--rdzv-id", "bench"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self._network}.1:{self._port}"),
            *("--rdzv-conf", ",".join(f"{key}={value}" for key, value in conf.items())),
            *("--local-addr", f"{self._network}.{index + 1}"),
            *(str(SCRIPT), self._way, str(self.directory), *self.work.arguments),
        ]
        self._start_agent(index, command, self._env)

    def _start_agent(self, index: int, command: list[str], more: dict[str, str]) -> None:
        # The same as Cluster gives to its nodes.
        env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}
        with open(self.directory / f"n{index}.log", "ab") as log:
            self._agents[index] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env, "BENCHMARK_NODE": f"n{index}"},
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  one system call, in a process of one thread
            )

    def agent(self, index: int) -> subprocess.Popen[bytes]:
        return self._agents[index]

    def host(self) -> int:
        return 0

    def _wait_for_store(self) -> None:
        address = (f"{self._network}.1", self._port)
        while self._agents[0].poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(address) == 0:
                    return
            time.sleep(0.05)


class TorchFT(Stock):
    """Torchft: a replica group per node, each under a torchrun of its own, and a lighthouse on n0."""

    survivors_keep_process = True

    def __init__(self, directory: Path, work: Work) -> None:
        lighthouse = Path(sys.executable).with_name("torchft_lighthouse")
        self._lighthouse_port = _free_port()
        command = [str(lighthouse), "--bind", f"127.0.0.1:{self._lighthouse_port}"]
        with open(directory / "lighthouse.log", "ab") as log:
            self._lighthouse = subprocess.Popen(
                [*command, "--min_replicas", str(work.min_nodes), "--join_timeout_ms", "1000"],
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  one system call, in a process of one thread
            )
        super().__init__(directory, work, {}, {})

    def start(self, index: int) -> None:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1"),
            *("--max-restarts", "1000000", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *(str(SCRIPT), "torchft", str(self.directory), *self.work.arguments),
        ]
        env = {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._lighthouse_port}",
            "REPLICA_GROUP_ID": str(index),
        }
        self._start_agent(index, command, {**env, "NUM_REPLICA_GROUPS": str(NODES)})

    def processes(self, index: int) -> list[psutil.Process]:
        """List a node's processes; n0's include the lighthouse."""
        lighthouse = [psutil.Process(self._lighthouse.pid)] if index == 0 else []
        return super().processes(index) + [p for p in lighthouse if self._lighthouse.poll() is None]

    def stop(self) -> None:
        super().stop()
        self._lighthouse.kill()
        self._lighthouse.wait()

    def _wait_for_store(self) -> None:
        """Nothing to wait for: there is no store for all nodes."""


def _free_port() -> int:
    """Find a port that is free at every address and outside the range of ephemeral ports."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def occupy_core() -> subprocess.Popen[bytes]:
    """Start a process that takes core 0 until this process ends."""
    code = "import os; os.sched_setaffinity(0, {0})\nwhile True: pass"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        preexec_fn=_die_with_parent,  # noqa: PLW1509  one system call, in a process of one thread
    )


def make_job(system: str, directory: Path, node_timeout_s: float | None, imports: str, work: Work) -> Job:
    """Start all nodes of ``system``'s job. ``node_timeout_s`` applies to ours; None is its default."""
    directory.mkdir(parents=True)
    os.environ["BENCH_IMPORTS"] = imports
    if system in OURS:
        flags = ["--node-timeout", str(node_timeout_s)] if node_timeout_s else []
        return Ours(directory, work, system, [*flags, "--preload", imports] if imports else flags)
    if system == "torchft":
        return TorchFT(directory, work)
    if system == "dcp":
        return Stock(directory, work, TUNED_CONF, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "dcp")
    if system == "tuned":
        return Stock(directory, work, TUNED_CONF, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    return Stock(directory, work, {}, {})


def kill_processes(processes: list[psutil.Process]) -> list[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return processes


def reap_processes(dead: list[psutil.Process]) -> None:
    """Wait for the end of killed processes. Orphans have become our children."""
    psutil.wait_procs(dead, timeout=30)


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
