"""Simulated nodes: a job on several nodes that are processes of this machine.

Each node has its own name, address and directory, and can be killed, wiped, damaged and started again. With
``hosts="namespaces"`` each has a network and a small disk of its own, which can be cut off and filled. A wait
is for facts that the nodes have told, never a guess of time. When the process that made the cluster ends, in
whatever way, the kernel ends the nodes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from elastic_resume import contract
from elastic_resume.errors import UsageError
from elastic_resume.faults.grounds import Hosts, Loopback, ground
from elastic_resume.faults.hosts import Namespaces
from elastic_resume.faults.mishaps import Mishaps, Moment
from elastic_resume.faults.moments import MomentError
from elastic_resume.faults.nodes import ClusterTimeoutError, Node, Recovery

__all__ = ["Cluster", "ClusterTimeoutError", "Hosts", "Moment", "MomentError", "Node", "Recovery"]


class Cluster(Mishaps):
    """Several nodes on this machine that run one job. Use it as a context manager, or call `stop`.

    As a context manager it raises a `MomentError` at its end if something that was planned never came.
    """

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
        hosts: Hosts | Namespaces | Loopback = "loopback",
        disk_bytes: int | None = None,
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
            hosts: "loopback": nodes are processes with an address each. "namespaces": each has a network and
                a small disk of its own; that takes root. Or networks that somebody else has made and closes
                after this cluster; or a ground of another kind, which this cluster closes.
            disk_bytes: size of each node's disk, with "namespaces"; default: 256 MB.
            fresh: start every agent as a new process, which imports torch for itself and for its zygote, as
                on a node of its own. Else they are forked from one that has done so, which saves seconds.

        Raises:
            MachineError: these hosts cannot be had here, and why.

        """
        directory = Path(directory).absolute()
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        (directory / "notices").mkdir(exist_ok=True)
        below = ground(hosts, nodes, disk_bytes)
        super().__init__(directory, run_id, below, workers_per_node)
        self._fresh = fresh
        self.nodes = [self._node(index, shared_disk=shared_disk) for index in range(nodes)]
        low, high = min_nodes or nodes, max_nodes or nodes
        self._shape = f"{low}:{high}" if low != high else str(high)
        self._flags = list(flags)
        self.env = {  # of every node; what is changed holds for later starts
            **{k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "ELASTIC_RESUME_"))},
            "GLOO_SOCKET_IFNAME": below.interface,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": below.temporary(directory / "tmp"),
            contract.ENV_STEP_MARK_S: "0.1",
            **self.arming.env,
            **(env or {}),
        }
        self.endpoints = [
            f"{one.address}:{below.port(index)}" for index, one in enumerate(self.nodes[:candidates])
        ]
        """Where the candidates' agents listen."""
        self._script: list[str] = []

    # ---- life ----------------------------------------------------------------------------------------

    def start(self, script: str | Path, *args: str, only: Sequence[int] | None = None) -> None:
        """Start the job on every node (or on those of ``only``)."""
        self._script = [str(script), *args]
        chosen = range(len(self.nodes)) if only is None else only
        for index in chosen:
            self.start_node(index)

    def start_node(self, index: int, env: Mapping[str, str] | None = None, flags: Sequence[str] = ()) -> None:
        """Start, or start again, the agent of one node; ``env`` and ``flags`` hold for this start only."""
        node = self.nodes[index]
        if node.alive:
            raise UsageError(f"node {node.name} is running already.")
        self._notice(index).unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "elastic_resume", "run"),
            *(
                "--nnodes",
                self._shape,
                "--nproc-per-node",
                str(self.workers_per_node),
                "--rdzv-id",
                self.run_id,
            ),
            *("--rdzv-endpoint", ",".join(self.endpoints)),
            *("--local-addr", node.address, "--node-name", node.name, "--ckpt-dir", str(node.ckpt_dir)),
            *self._flags,
            *flags,
            *self._script,
        ]
        its = {
            contract.ENV_PREEMPTION_NOTICE: f"file:{self._notice(index)}",
            contract.ENV_NODE_NAME: node.name,  # an agent's failpoints go by it too
        }
        with open(node.log, "ab") as log:
            environ = {**its, **self.env, **(env or {})}
            node.agent = self._ground.start(index, command, environ, log, fresh=self._fresh)
        node.killed = node.waited_for = False

    def stop(self) -> None:
        """Kill what is left of every node, and give back what they stood on. A second call does nothing."""
        self._moments.close()
        self.kill_nodes(range(len(self.nodes)))
        if self._ground.has_disks:
            self._keep()
        self._ground.close()

    def __enter__(self) -> Cluster:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._moments.complain()
                self._moments.require_all()
        finally:
            self.stop()

    # ---- inside --------------------------------------------------------------------------------------

    def _node(self, index: int, *, shared_disk: bool) -> Node:
        name = f"n{index}"
        ckpt_dir = root = self.ckpt_dir
        if not shared_disk:
            ckpt_dir = self.directory / "disks" / name
            root = self._ground.root(index, ckpt_dir)
            seen = self.run_dir / name
            seen.parent.mkdir(parents=True, exist_ok=True)
            if not seen.is_symlink():
                seen.symlink_to(root / self.run_id / name)
        log = self.directory / "logs" / f"{name}.log"
        return Node(name, self._ground.address(index), ckpt_dir, root / self.run_id / name, log)

    def _keep(self) -> None:
        """Copy what a report and a look at the newest checkpoints need from disks that are about to go."""
        for index, node in enumerate(self.nodes):
            seen = self.run_dir / node.name
            if not seen.is_symlink():
                continue
            seen.unlink()
            with contextlib.suppress(OSError, shutil.Error):  # wiped, broken, or never used
                known = [entry.path.name for entry in self.checkpoints(index)]
                shutil.copytree(node.directory, seen, ignore=shutil.ignore_patterns(*known[1:], ".tmp-*"))
            node.directory = seen
