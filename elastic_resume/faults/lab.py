"""Simulated nodes: a job on several nodes that are processes of this machine.

Each node has its own name, loopback address and directory, and can be killed, wiped, damaged and started
again; with ``hosts=Namespaces(n)`` each has a network interface of its own, and its link can be cut. What is
waited for are facts in the nodes' event files, never a guess of time. When the process that made the cluster
ends, in whatever way, the kernel ends the nodes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import psutil

from elastic_resume import contract, events
from elastic_resume.errors import UsageError
from elastic_resume.events import Event
from elastic_resume.faults import ending, nursery
from elastic_resume.faults.brood import Forked
from elastic_resume.faults.hosts import INTERFACE, Namespaces
from elastic_resume.faults.ports import free_port
from elastic_resume.store.catalog import Catalog, Entry

T = TypeVar("T")

POLL_S = 0.02
PORT = 29400  # where a node has a network of its own: there every port is free


class ClusterTimeoutError(AssertionError):
    """What was waited for did not happen; the text ends with the nodes' last output."""


@dataclass
class Node:
    """One simulated node. ``agent`` is None before its first start."""

    name: str
    address: str
    ckpt_dir: Path
    directory: Path
    log: Path
    agent: subprocess.Popen[bytes] | Forked | None = None

    @property
    def alive(self) -> bool:
        """Whether the node's agent runs."""
        return self.agent is not None and self.agent.poll() is None


class Cluster:
    """Several nodes on this machine that run one job. Use it as a context manager, or call `stop`."""

    def __init__(
        self,
        directory: Path | str,
        *,
        nodes: int = 3,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        workers_per_node: int = 1,
        run_id: str = "job",
        shared_disk: bool = False,
        candidates: int = 3,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        hosts: Namespaces | None = None,
        fresh: bool = False,
    ) -> None:
        """Describe the cluster; nothing runs before `start`.

        Args:
            directory: gets ``logs/``, ``disks/NODE/`` and ``checkpoints/RUN_ID/``, where each node's
                directory can be seen beside the others, as `elastic-resume report` wants it.
            nodes: how many nodes there are, n0 to n{nodes-1}.
            min_nodes: fewest nodes that train; default ``nodes``.
            max_nodes: most nodes that train; default ``nodes``.
            workers_per_node: local ranks.
            run_id: the job's name.
            shared_disk: let all nodes see one checkpoint directory, as on a shared file system; otherwise
                each node has a disk of its own.
            candidates: so many of the first nodes are named by ``--rdzv-endpoint``.
            flags: more flags of ``elastic-resume run``.
            env: added to the environment of every node; it wins over what is set here.
            hosts: the nodes' networks; their maker closes them, after this cluster. Default: loopback.
            fresh: start every agent as a new process, which imports torch for itself and for its zygote, as
                on a node of its own. Else they are forked from one that has done so, which saves seconds.

        """
        self.directory = Path(directory)
        self.run_id = run_id
        self.ckpt_dir = self.directory / "checkpoints"
        self.run_dir = self.ckpt_dir / run_id
        self._hosts = hosts
        self._fresh = fresh
        network = f"127.{1 + secrets.randbelow(253)}.{secrets.randbelow(256)}"
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        self.nodes = [
            self._node(
                f"n{i}",
                hosts.address(i) if hosts else f"{network}.{i + 1}",
                None if shared_disk else self.directory / "disks" / f"n{i}",
            )
            for i in range(nodes)
        ]
        low, high = min_nodes or nodes, max_nodes or nodes
        self._shape = f"{low}:{high}" if low != high else str(high)
        self._workers = workers_per_node
        self._flags = list(flags)
        self.env = {  # of every node; what is changed holds for later starts
            **{k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "ELASTIC_RESUME_"))},
            "GLOO_SOCKET_IFNAME": INTERFACE if hosts else "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            contract.ENV_STEP_MARK_S: "0.1",
            **(env or {}),
        }
        self._endpoint = ",".join(
            f"{n.address}:{PORT if hosts else free_port(n.address)}" for n in self.nodes[:candidates]
        )
        self._script: list[str] = []

    # ---- life ----------------------------------------------------------------------------------------

    def start(self, script: str | Path, *args: str, only: Sequence[int] | None = None) -> None:
        """Start the job on every node (or on those of ``only``)."""
        self._script = [str(script), *args]
        for index in range(len(self.nodes)) if only is None else only:
            self.start_node(index)

    def start_node(self, index: int, env: Mapping[str, str] | None = None, flags: Sequence[str] = ()) -> None:
        """Start, or start again, the agent of one node; ``env`` and ``flags`` hold for this start only."""
        node = self.nodes[index]
        if node.alive:
            raise UsageError(f"node {node.name} is running already.")
        command = [
            *(sys.executable, "-m", "elastic_resume", "run"),
            *("--nnodes", self._shape, "--nproc-per-node", str(self._workers), "--rdzv-id", self.run_id),
            *("--rdzv-endpoint", self._endpoint),
            *("--local-addr", node.address, "--node-name", node.name, "--ckpt-dir", str(node.ckpt_dir)),
            *self._flags,
            *flags,
            *self._script,
        ]
        environ = {**self.env, **(env or {})}
        with open(node.log, "ab") as log:
            network = self._hosts.path(index) if self._hosts else ""
            forked = None if self._fresh else nursery.start(command, environ, log, network=network)
            node.agent = forked or subprocess.Popen(
                self._hosts.command(index, command) if self._hosts else command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
                preexec_fn=ending.die_with_parent,  # noqa: PLW1509  one system call, made before any thread matters
            )

    def stop(self) -> None:
        """Kill what is left of every node."""
        self.kill_nodes(range(len(self.nodes)))

    def __enter__(self) -> Cluster:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- what befalls the nodes ----------------------------------------------------------------------

    def kill_worker(self, index: int, local_rank: int = 0, sig: signal.Signals = signal.SIGKILL) -> int:
        """Send ``sig`` to one worker; give its process id."""
        starts = [e for e in self.events_of(index, "worker-start") if e.get("local_rank") == local_rank]
        if not starts:
            raise UsageError(f"node {self.nodes[index].name} has not started a worker {local_rank} yet.")
        pid = int(starts[-1]["pid"])
        os.kill(pid, sig)
        return pid

    def kill_agent(self, index: int, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send ``sig`` to a node's agent alone."""
        agent = self.nodes[index].agent
        if agent is not None and agent.poll() is None:
            agent.send_signal(sig)

    def kill_node(self, index: int) -> None:
        """Let a node die: SIGKILL to its agent and all it has started, at once."""
        self.kill_nodes([index])

    def kill_nodes(self, indices: Sequence[int]) -> None:
        """Let several nodes die in the same moment."""
        doomed = [process for index in indices for process in self.processes(index)]
        for process in doomed:
            ending.kill(process)
        for index in indices:
            agent = self.nodes[index].agent
            if agent is not None:
                agent.wait()
        # What was started between the two looks has lost its parent and ends by the kernel's hand.
        for process in doomed:
            ending.wait_for(process)

    @property
    def hosts(self) -> Namespaces:
        """The nodes' networks, for what this class has no word for."""
        if self._hosts is None:
            raise UsageError("these nodes share one network: make the Cluster with hosts=Namespaces(n).")
        return self._hosts

    def cut(self, index: int) -> None:
        """Let a node's link go silent; with `kill_node` after it, let the node lose its power."""
        self.hosts.cut(index)

    def restore(self, index: int) -> None:
        """Let a node's link work again, within its side of a partition."""
        self.hosts.restore(index)

    def partition(self, *groups: Collection[int]) -> None:
        """Let nodes reach only those of their own group; each is in one."""
        self.hosts.partition(groups)

    def heal(self) -> None:
        """Let every node reach every other."""
        self.hosts.heal()

    def wipe(self, index: int) -> None:
        """Empty a dead node's disk: its checkpoints, its events, all of its directory."""
        node = self.nodes[index]
        if node.alive:
            raise UsageError(f"node {node.name} is running: kill it before its disk is wiped.")
        shutil.rmtree(node.directory, ignore_errors=True)

    def truncate_newest(self, index: int, keep: float = 0.5) -> Path:
        """Cut off the end of a node's newest checkpoint; give the path of its directory."""
        path = self._newest(index).path
        state = path / contract.STATE_FILE
        os.truncate(state, int(state.stat().st_size * keep))
        return path

    def flip_bit_newest(self, index: int, at: float = 0.9) -> Path:
        """Flip one bit in the data of a node's newest checkpoint, at this fraction of its size."""
        path = self._newest(index).path
        with open(path / contract.STATE_FILE, "r+b") as file:
            place = int(file.seek(0, os.SEEK_END) * at)
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))
        return path

    # ---- what can be seen ----------------------------------------------------------------------------

    def events(self, kind: str | None = None) -> list[Event]:
        """All events of all nodes by time, or those of one kind."""
        return [event for event in events.read_run(self.run_dir) if kind in (None, event["event"])]

    def events_of(self, index: int, kind: str | None = None) -> list[Event]:
        """One node's events in order, or those of one kind."""
        path = self.nodes[index].directory / contract.EVENTS_FILE
        return [event for event in events.read(path) if kind in (None, event["event"])]

    def checkpoints(self, index: int) -> list[Entry]:
        """A node's checkpoints, newest first, each with what is wrong with it, if anything."""
        return Catalog(self.nodes[index].directory, self.run_id).entries()

    def output(self, index: int) -> str:
        """All that a node's agent and workers have printed."""
        log = self.nodes[index].log
        return log.read_text(errors="replace") if log.exists() else ""

    def processes(self, index: int) -> list[psutil.Process]:
        """A node's agent and all of its descendants that are alive."""
        agent = self.nodes[index].agent
        if agent is None:
            return []
        try:
            process = psutil.Process(agent.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    # ---- waiting -------------------------------------------------------------------------------------

    def wait(self, look: Callable[[], T | None], what: str, timeout_s: float = 120.0) -> T:
        """Call ``look`` until it gives something true, and return that.

        Raises:
            ClusterTimeoutError: not within ``timeout_s``, or no node is left to make it happen.

        """
        deadline = time.monotonic() + timeout_s
        while True:
            idle = not any(node.alive for node in self.nodes)
            found = look()
            if found:
                return found
            if idle or time.monotonic() > deadline:
                why = "no node runs any more" if idle else f"{timeout_s:.0f} s went by"
                raise ClusterTimeoutError(f"{what}: {why}.\n{self._tails()}")
            time.sleep(POLL_S)

    def wait_step(self, step: int, generation: int = 0, timeout_s: float = 120.0) -> Event:
        """Wait until a rank has finished ``step`` (in ``generation`` or a later one); give the event."""
        return self.wait(
            lambda: next(
                (e for e in self.events("step") if e["step"] >= step and e["generation"] >= generation), None
            ),
            f"step {step}" + (f" of generation {generation}" if generation else ""),
            timeout_s,
        )

    def wait_generation(self, generation: int, timeout_s: float = 120.0) -> Event:
        """Wait until ``generation`` (or a later one) has resumed; give its resume event."""
        return self.wait(
            lambda: next((e for e in self.events("resume") if e["generation"] >= generation), None),
            f"generation {generation}",
            timeout_s,
        )

    def wait_commit(self, index: int, step: int, timeout_s: float = 120.0) -> Event:
        """Wait until a node has committed a checkpoint of ``step`` or later; give the event."""
        return self.wait(
            lambda: next((e for e in self.events_of(index, "commit") if e["step"] >= step), None),
            f"a checkpoint of step {step} on {self.nodes[index].name}",
            timeout_s,
        )

    def wait_exit(self, timeout_s: float = 240.0, only: Sequence[int] | None = None) -> list[int]:
        """Wait until the agents that run (or those of ``only``) have ended; give their exit codes."""
        running = [node for node in self.nodes if node.alive]
        if only is not None:
            running = [self.nodes[index] for index in only]
        deadline = time.monotonic() + timeout_s
        codes = []
        for node in running:
            if node.agent is None:
                continue
            try:
                codes.append(node.agent.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise ClusterTimeoutError(
                    f"node {node.name} did not end within {timeout_s:.0f} s.\n{self._tails()}"
                ) from None
        return codes

    # ---- inside --------------------------------------------------------------------------------------

    def _node(self, name: str, address: str, disk: Path | None) -> Node:
        seen = self.run_dir / name
        if disk is not None:
            seen.parent.mkdir(parents=True, exist_ok=True)
            if not seen.is_symlink():
                seen.symlink_to((disk / self.run_id / name).absolute())
        ckpt_dir = disk or self.ckpt_dir
        log = self.directory / "logs" / f"{name}.log"
        return Node(name, address, ckpt_dir, ckpt_dir / self.run_id / name, log)

    def _newest(self, index: int) -> Entry:
        found = self.checkpoints(index)
        if not found:
            raise UsageError(f"node {self.nodes[index].name} has no checkpoint.")
        return found[0]

    def _tails(self) -> str:
        return "\n".join(f"--- {n.name}\n{self.output(i)[-3000:]}" for i, n in enumerate(self.nodes))
