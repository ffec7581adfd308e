"""Simulated nodes: a job on several nodes that are processes of this machine.

Each node has its own name, address and directory, and can be killed, wiped, damaged and started again. With
``hosts="namespaces"`` each has a network and a small disk of its own, which can be cut off and filled. A wait
is for facts that the nodes have told, never a guess of time. When the process that made the cluster ends, in
whatever way, the kernel ends the nodes.

What can befall simulated nodes: one method for each fault, done for real by the kernel.

Processes are killed and stopped by signals, checkpoints damaged in their files; a disk fails or is slow by a
failpoint of whoever uses it. Links fail and disks are full where each node has its own; elsewhere the method
says what that takes. What a method does
lasts until its counterpart is called, or the node is started again.

Simulated nodes as one sees them from outside: what they have told, kept and printed, and waiting for it.

What is waited for are facts, in the nodes' event files and on the pages where their ranks note each step;
never a guess of time. Looking changes nothing, and goes on when nodes are dead.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import psutil

from elastic_resume import constants, events
from elastic_resume.checkpoint.catalog import Catalog, CatalogEntry
from elastic_resume.errors import UsageError
from elastic_resume.events import Event
from elastic_resume.report import incidents, summary, text_report
from elastic_resume.snapshot import progress_page
from elastic_resume.snapshot.progress_page import ProgressRecord
from elastic_resume.testing import fork_server
from elastic_resume.testing.backends import Hosts, LoopbackBackend, make_backend
from elastic_resume.testing.triggers import FailpointController, ScheduledAction, TriggerError, TriggerWatcher
from elastic_resume.testing.virtual_network import VirtualNetwork

T = TypeVar("T")

POLL_S = 0.02
OUTPUT_TAIL_CHARS = 4000  # characters of each node's output in an error


class ClusterTimeoutError(AssertionError):
    """What was waited for did not happen; the text ends with the nodes' last output."""


@dataclass
class Node:
    """One simulated node. ``agent`` is None before its first start.

    ``ckpt_dir`` is where the node has its disk; ``directory`` is where this process finds the node's own
    directory on it.
    """

    name: str
    address: str
    ckpt_dir: Path
    directory: Path
    log: Path
    agent: fork_server.AgentProcess | None = None
    killed: bool = False  # by whoever simulates it, since its last start
    exit_collected: bool = False  # `wait_exit` has given how it ended, since its last start

    @property
    def alive(self) -> bool:
        """Whether the node's agent runs."""
        return self.agent is not None and self.agent.poll() is None


@dataclass(frozen=True)
class Recovery:
    """One failure that the job recovered from, as `elastic-resume report` tells it.

    ``generation`` is the one that went on; ``cause`` is who was first and why; ``seconds`` are from the first
    sign of it to that generation's first step (None: the logs do not say); ``lost_steps`` were run again.
    """

    generation: int
    cause: str
    seconds: float | None
    lost_steps: int | None


class ClusterObserver:
    """Several simulated nodes of one job."""

    def __init__(self, directory: Path, run_id: str, backend: LoopbackBackend, workers_per_node: int) -> None:
        """See the nodes that stand on ``ground`` and keep what they do below ``directory``."""
        self.directory = directory
        self.run_id = run_id
        self.ckpt_dir = directory / "checkpoints"
        self.run_dir = self.ckpt_dir / run_id
        self.nodes: list[Node] = []
        self._backend = backend
        self.workers_per_node = workers_per_node
        self._triggers = TriggerWatcher(self.rank_progress)

    # ---- what can be seen ----------------------------------------------------------------------------

    def events(self, kind: str | None = None) -> list[Event]:
        """All events of all nodes by time, or those of one kind; without those on a disk that fails."""
        try:
            found = events.read_run(self.run_dir)
        except OSError:
            told = (event for index in range(len(self.nodes)) for event in self.node_events(index))
            found = sorted(told, key=lambda event: event["t"])
        return [event for event in found if kind in (None, event["event"])]

    def node_events(self, index: int, kind: str | None = None) -> list[Event]:
        """One node's events by time, or those of one kind; none while its disk fails."""
        with contextlib.suppress(OSError):
            found = events.read(self.nodes[index].directory / constants.EVENTS_FILE)
            wanted = (event for event in found if kind in (None, event["event"]))
            return sorted(wanted, key=lambda event: event["t"])
        return []

    def checkpoints(self, index: int) -> list[CatalogEntry]:
        """A node's checkpoints, newest first, each with what is wrong with it, if anything."""
        return Catalog(self.nodes[index].directory, self.run_id).list_entries()

    def output(self, index: int) -> str:
        """All that a node's agent and workers have printed."""
        log = self.nodes[index].log
        return log.read_text(errors="replace") if log.exists() else ""

    def processes(self, index: int) -> list[psutil.Process]:
        """A node's agent and all of its descendants that are alive."""
        return self._backend.processes(index)

    def process(self, index: int, pid: int) -> psutil.Process | None:
        """The process of a node with this id; None: it has ended."""
        return next((one for one in self.processes(index) if one.pid == pid), None)

    def rank_progress(self) -> Iterator[tuple[int, progress_page.ProgressRecord]]:
        """What each rank has noted of the step that it finished last: node, and line of its board."""
        for index, node in enumerate(self.nodes):
            for line in progress_page.read_records(
                node.directory / constants.PROGRESS_FILE, self.workers_per_node
            ):
                yield index, line

    @property
    def lost_steps(self) -> int:
        """How many steps that had been finished were run again, over all failures so far."""
        return incidents.build_history_from_events(self.events()).recomputed_steps

    @property
    def recoveries(self) -> list[Recovery]:
        """The failures that the job has recovered from so far, in order."""
        rows = incidents.build_history_from_events(self.events()).generations
        return [
            Recovery(following.number, row.end.text, row.recovery_s, row.recomputed_steps)
            for row, following in itertools.pairwise(rows)
            if row.end.is_failure
        ]

    def report_text(self) -> str:
        """What `elastic-resume report` tells of the run so far."""
        return text_report.format_text(summary.build_run_report(self.events()))

    def output_tails(self) -> str:
        """What each node has printed last."""
        return "\n".join(
            f"--- {n.name}\n{self.output(i)[-OUTPUT_TAIL_CHARS:]}" for i, n in enumerate(self.nodes)
        )

    # ---- waiting -------------------------------------------------------------------------------------

    @overload
    def wait(self, condition: Callable[[], T | None], description: str, timeout_s: float = 120.0) -> T: ...

    @overload
    def wait(
        self,
        *,
        step: int | None = None,
        generation: int | None = None,
        commit: int | None = None,
        node: int | None = None,
        timeout_s: float = 120.0,
    ) -> Event: ...

    def wait(
        self,
        condition: Callable[[], Any] | None = None,
        description: str = "",
        timeout_s: float = 120.0,
        *,
        step: int | None = None,
        generation: int | None = None,
        commit: int | None = None,
        node: int | None = None,
    ) -> Any:
        """Wait for a fact, and give the event that tells of it; or the true value of ``condition``.

        Args:
            condition: is called until it gives something true.
            description: of the condition, for the error.
            timeout_s: limit.
            step: until a rank has finished this step or a later one.
            generation: until this generation or a later one has resumed; with ``step``: of such a one.
            commit: until a checkpoint of this step or a later one is on a disk.
            node: with ``step`` and ``commit``: on this node.

        Raises:
            ClusterTimeoutError: not within ``timeout_s``, or no node is left to make it happen.
            MomentError: something that was planned with `at` went wrong.

        """
        if condition is None:
            condition, description = self._event_condition(step, generation, commit, node)
        deadline = time.monotonic() + timeout_s
        while True:
            idle = not any(one.alive for one in self.nodes)
            self._triggers.raise_error()
            found = condition()
            if found:
                return found
            if idle or time.monotonic() > deadline:
                why = "no node runs any more" if idle else f"{timeout_s:.0f} s went by"
                raise ClusterTimeoutError(f"{description}: {why}.\n{self.output_tails()}")
            time.sleep(POLL_S)

    def _event_condition(
        self, step: int | None, generation: int | None, commit: int | None, node: int | None
    ) -> tuple[Callable[[], Event | None], str]:
        """Make a condition for one event, and words for it."""
        if [step is None and generation is None, commit is None].count(False) != 1:
            raise UsageError(
                "wait for step=, for generation=, for both, or for commit=; or give a condition."
            )
        kind, least = ("commit", commit) if commit is not None else ("step", step)
        if least is None:
            kind = "resume"
        on = "" if node is None else f" on {self.nodes[node].name}"
        of = "" if generation is None else f" of generation {generation}"
        words = {"commit": f"a checkpoint of step {least}", "step": f"step {least}{of}", "resume": of[4:]}

        def condition() -> Event | None:
            found = self.events(kind) if node is None else self.node_events(node, kind)
            wanted = (e for e in found if e["step"] >= (least or 0) and e["generation"] >= (generation or 0))
            return next(wanted, None)

        return condition, words[kind] + on

    def wait_exit(self, timeout_s: float = 240.0, only: Sequence[int] | None = None) -> list[int]:
        """Wait until all agents have ended; give the exit codes of those that were not killed here.

        Those that it has given before are left out, unless they have been started again. With ``only``: until
        the agents of these nodes have; give all of their exit codes.

        Raises:
            UsageError: no node was started.
            ClusterTimeoutError: not within ``timeout_s``.
            MomentError: something that was planned with `at` went wrong, or never came in a job that is done.

        """
        if all(one.agent is None for one in self.nodes):
            raise UsageError("wait_exit: no node was started; call start(script) before.")
        chosen = [one for one in self.nodes if one.alive or not one.exit_collected]
        if only is not None:
            chosen = [self.nodes[index] for index in only]
        deadline = time.monotonic() + timeout_s
        while running := [one for one in chosen if one.alive]:
            self._triggers.raise_error()
            if time.monotonic() > deadline:
                names = ", ".join(one.name for one in running)
                raise ClusterTimeoutError(
                    f"{names}: not ended within {timeout_s:.0f} s.\n{self.output_tails()}"
                )
            time.sleep(POLL_S)
        ended = [one for one in chosen if one.agent is not None and (only is not None or not one.killed)]
        codes = [one.agent.wait() for one in ended if one.agent is not None]
        for one in ended:
            one.exit_collected = True
        self._triggers.raise_error()
        if not any(one.alive for one in self.nodes) and not any(codes):
            self._triggers.require_all_done()
        return codes


class ClusterFaults(ClusterObserver):
    """Nodes, and the faults that are injected into them."""

    def __init__(self, directory: Path, run_id: str, backend: LoopbackBackend, workers_per_node: int) -> None:
        """See `Nodes`."""
        super().__init__(directory, run_id, backend, workers_per_node)
        self.failpoints = FailpointController(directory / "armed")
        """For what processes of the nodes do to themselves, with more conditions than `arm` has."""
        self._disk_failpoint_ids: dict[tuple[int, str], str] = {}  # of failpoints, by node and action

    # ---- processes -----------------------------------------------------------------------------------

    def kill_worker(self, index: int, local_rank: int = 0, sig: signal.Signals = signal.SIGKILL) -> int:
        """Send ``sig`` to one worker; give its process id. SIGSTOP makes it hang, SIGCONT goes on."""
        starts = [e for e in self.node_events(index, "worker-start") if e.get("local_rank") == local_rank]
        if not starts:
            raise UsageError(f"node {self.nodes[index].name} has not started a worker {local_rank} yet.")
        return self.signal_process(index, int(starts[-1]["pid"]), sig)

    def signal_process(self, index: int, pid: int, sig: signal.Signals) -> int:
        """Send ``sig`` to a process of a node; give its id."""
        process = self.process(index, pid)
        if process is None:
            raise UsageError(f"process {pid} of node {self.nodes[index].name} has ended already.")
        process.send_signal(sig)
        return process.pid

    def kill_agent(self, index: int, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send ``sig`` to a node's agent alone."""
        node = self.nodes[index]
        if node.agent is not None and node.agent.poll() is None:
            node.killed = node.killed or sig == signal.SIGKILL
            node.agent.send_signal(sig)

    def kill_node(self, index: int) -> None:
        """Let a node die at once, agent and all it has started; its peers see their connections end."""
        self.kill_nodes([index])

    def kill_nodes(self, indices: Sequence[int]) -> None:
        """Let several nodes die in the same moment."""
        for index in indices:
            self.nodes[index].killed = True
        self._backend.crash(indices)

    def poweroff(self, index: int) -> None:
        """Let a node lose its power: its link falls silent, then all its processes are gone.

        Its peers are told nothing, and have to find out by its silence. Starting the node again gives it its
        link back.
        """
        self.nodes[index].killed = True
        self._backend.poweroff([index])

    def give_notice(self, index: int) -> None:
        """Tell a node that it will be taken away, as a cloud does: it saves what it has, and leaves.

        Its agent looks for a notice once a second. Starting the node again takes the notice back.
        """
        self._preemption_notice_path(index).touch()

    # ---- links ---------------------------------------------------------------------------------------

    @property
    def network(self) -> VirtualNetwork:
        """The nodes' networks, for what this class has no word for."""
        return self._backend.network

    def cut(self, index: int) -> None:
        """Let a node's link go silent, both ways: nothing is refused, no connection ends."""
        self.network.cut(index)

    def restore_link(self, index: int) -> None:
        """Let a node's link work again, and fully, within its side of a partition."""
        self.network.restore_link(index)

    def cut_link(self, sender: int, receiver: int, *, one_way: bool = False) -> None:
        """Let what one node sends to another vanish; and, unless ``one_way``, what that sends back."""
        self.network.cut_link(sender, receiver, one_way=one_way)

    def partition(self, *groups: Collection[int]) -> None:
        """Let nodes reach only those of their own group; each is in one. Silence, as with `cut`."""
        self.network.partition(groups)

    def heal(self) -> None:
        """Let every node reach every other: no cut, partition, loss or rate is left."""
        self.network.heal()

    def lose_packets(self, index: int, percent: float) -> None:
        """Let so many of a hundred packets that a node sends or is sent vanish, by chance; 0: none."""
        self.network.lose_packets(index, percent)

    def limit_rate(self, index: int, bytes_per_s: float) -> None:
        """Let a node's link carry so much, each way; 0: as much as it can."""
        self.network.limit_rate(index, bytes_per_s)

    # ---- disks ---------------------------------------------------------------------------------------

    def fill_disk(self, index: int) -> None:
        """Fill a node's disk to the last block: who writes gets ENOSPC, until `free_disk`."""
        self._backend.disk(index).fill()

    def free_disk(self, index: int) -> None:
        """Undo `fill_disk`."""
        self._backend.disk(index).free()

    def break_disk(self, index: int) -> None:
        """Let all that checkpoints and records of a node ask of its disk fail with EIO, until `mend_disk`."""
        self._arm_disk_failpoint(index, "raise")

    def mend_disk(self, index: int) -> None:
        """Undo `break_disk`."""
        self._disarm_disk_failpoint(index, "raise")

    def slow_disk(self, index: int, delay_s: float) -> None:
        """Let each of those requests take so much longer; 0: no longer."""
        self._arm_disk_failpoint(index, "delay", f":{delay_s}") if delay_s else self._disarm_disk_failpoint(
            index, "delay"
        )

    def wipe(self, index: int) -> None:
        """Empty a dead node's disk: its checkpoints, its events, all of its directory.

        What it has told so far is kept beside the nodes' directories: `lost_steps` and the report need it.
        """
        node = self.nodes[index]
        if node.alive:
            raise UsageError(f"node {node.name} is running: kill it before its disk is wiped.")
        with contextlib.suppress(OSError):  # it has told nothing, or its disk fails
            told = (node.directory / constants.EVENTS_FILE).read_bytes()
            self._save_peer_events(line + b"\n" for line in told.splitlines())
        shutil.rmtree(node.directory, ignore_errors=True)

    def truncate_newest(self, index: int, keep_fraction: float = 0.5) -> Path:
        """Cut off the end of a node's newest checkpoint; give the path of its directory."""
        path = self._newest_checkpoint(index).path
        state = path / constants.STATE_FILE
        os.truncate(state, int(state.stat().st_size * keep_fraction))
        return path

    def corrupt(self, index: int, fraction: float = 0.9) -> Path:
        """Flip one bit in the data of a node's newest checkpoint; give the path of its directory.

        ``at``: where, as a fraction of its size.
        """
        path = self._newest_checkpoint(index).path
        with open(path / constants.STATE_FILE, "r+b") as file:
            place = int(file.seek(0, os.SEEK_END) * fraction)
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))
        return path

    # ---- the rest ------------------------------------------------------------------------------------

    def arm(self, index: int, failpoint: str) -> str:
        """Let a process of a node do something to itself at a named point; once, whichever comes first.

        ``point`` is written as `failpoints.py` says: "commit.after-data=kill", "step=raise;step=20". Gives
        the mark by which `arming` can be asked whether it has happened.
        """
        return self.failpoints.arm(failpoint, node=self.nodes[index].name)

    # ---- at a step -----------------------------------------------------------------------------------

    def at(self, *, step: int, rank: int | None = None, node: int | None = None) -> Trigger:
        """Plan what happens as soon as a rank has finished a step: ``cluster.at(step=20, rank=1).kill()``.

        Args:
            step: or a later one, if that is seen first; milliseconds pass.
            rank: of this rank; default: of any.
            node: of a rank on this node; default: on any.

        """
        return Trigger(self, step, rank, node)

    def schedule(self, action: ScheduledAction) -> None:
        """Do something when its moment has come; errors come up where the test waits."""
        self._triggers.schedule(action)

    # ---- inside --------------------------------------------------------------------------------------

    def _newest_checkpoint(self, index: int) -> CatalogEntry:
        found = self.checkpoints(index)
        if not found:
            raise UsageError(f"node {self.nodes[index].name} has no checkpoint.")
        return found[0]

    def _arm_disk_failpoint(self, index: int, action: str, value: str = "") -> None:
        """Arm for one node the failpoint that every request to the disk passes."""
        self._disarm_disk_failpoint(index, action)
        mark = self.failpoints.arm(f"disk.request={action}{value}", node=self.nodes[index].name, once="")
        self._disk_failpoint_ids[index, action] = mark

    def _disarm_disk_failpoint(self, index: int, action: str) -> None:
        self.failpoints.disarm(self._disk_failpoint_ids.pop((index, action), ""))

    def _save_peer_events(self, lines: Iterable[bytes]) -> None:
        """Write down events as told by others, as far as readers know."""
        with open(self.run_dir / constants.PEER_EVENTS_FILE, "ab") as log:
            log.writelines(lines)

    def _preemption_notice_path(self, index: int) -> Path:
        """The file that is a node's notice of preemption."""
        return self.directory / "notices" / self.nodes[index].name


class Trigger:
    """A moment of a job. Each method plans something for it, once, and returns at once."""

    def __init__(self, cluster: ClusterFaults, step: int, rank: int | None, node: int | None) -> None:
        """See `Mishaps.at`."""
        self._cluster, self._step, self._rank, self._node = cluster, step, rank, node

    def do(self, action: Callable[..., object], *words: object) -> None:
        """Call ``act(*words)``, in a thread of its own: any method of the cluster, or what you like."""

        def do(*_: object) -> None:
            action(*words)

        self._schedule(getattr(action, "__name__", str(action)), do)

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Kill: with ``rank=`` that rank's worker (by this signal), with ``node=`` the whole node."""
        if self._rank is not None:
            self._schedule(f"{sig.name}", lambda index, line: self._signal_worker(index, line, sig))
        elif self._node is not None and sig == signal.SIGKILL:
            self._schedule("the kill", lambda index, _: self._cluster.kill_node(index))
        else:
            raise UsageError("at(…).kill() kills the worker of rank=, by any signal, or all of node=.")

    def poweroff(self) -> None:
        """Let the node lose its power: that of ``node=``, or the one on which ``rank=`` is."""
        self._schedule_on_node("poweroff", self._cluster.poweroff)

    def cut(self) -> None:
        """Let the node's link go silent."""
        self._schedule_on_node("cut", self._cluster.cut)

    def fill_disk(self) -> None:
        """Fill the node's disk."""
        self._schedule_on_node("fill_disk", self._cluster.fill_disk)

    def corrupt(self) -> None:
        """Flip a bit in the node's newest checkpoint."""
        self._schedule_on_node("corrupt", self._cluster.corrupt)

    def partition(self, *groups: Collection[int]) -> None:
        """Let nodes reach only those of their own group."""
        self._schedule("partition", lambda _, __: self._cluster.partition(*groups))

    def heal(self) -> None:
        """Let every node reach every other again."""
        self._schedule("heal", lambda _, __: self._cluster.heal())

    def _schedule_on_node(self, description: str, action: Callable[[int], object]) -> None:
        if self._rank is None and self._node is None:
            raise UsageError(f"at(…).{description}() takes the rank= or the node= that it befalls.")

        def do(index: int, _: ProgressRecord) -> None:
            action(index)

        self._schedule(description, do)

    def _signal_worker(self, index: int, progress: ProgressRecord, sig: signal.Signals) -> bool:
        """Send a signal to a worker; False: it is just ending, and the next one of its rank is meant."""
        process = self._cluster.process(index, progress.worker.pid)
        try:
            if process is not None:
                process.send_signal(sig)
        except psutil.NoSuchProcess:
            return False
        return process is not None

    def _schedule(self, description: str, action: Callable[[int, ProgressRecord], object]) -> None:
        self._cluster.schedule(ScheduledAction(description, self._step, self._rank, self._node, action))


__all__ = ["Cluster", "ClusterTimeoutError", "Hosts", "Node", "Recovery", "Trigger", "TriggerError"]


class Cluster(ClusterFaults):
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
        hosts: Hosts | VirtualNetwork | LoopbackBackend = "loopback",
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
        below = make_backend(hosts, nodes, disk_bytes)
        super().__init__(directory, run_id, below, workers_per_node)
        self._start_fresh = fresh
        self.nodes = [self._build_node(index, shared_disk=shared_disk) for index in range(nodes)]
        low, high = min_nodes or nodes, max_nodes or nodes
        self._nnodes = f"{low}:{high}" if low != high else str(high)
        self._flags = list(flags)
        self.env = {  # of every node; what is changed holds for later starts
            **{k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "ELASTIC_RESUME_"))},
            "GLOO_SOCKET_IFNAME": below.interface,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": below.temporary_dir(directory / "tmp"),
            constants.ENV_STEP_MARK_S: "0.1",
            **self.failpoints.env,
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
        self._preemption_notice_path(index).unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "elastic_resume", "run"),
            *(
                "--nnodes",
                self._nnodes,
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
            constants.ENV_PREEMPTION_NOTICE: f"file:{self._preemption_notice_path(index)}",
            constants.ENV_NODE_NAME: node.name,  # an agent's failpoints go by it too
        }
        with open(node.log, "ab") as log:
            environ = {**its, **self.env, **(env or {})}
            node.agent = self._backend.start(index, command, environ, log, fresh=self._start_fresh)
        node.killed = node.exit_collected = False

    def stop(self) -> None:
        """Kill what is left of every node, and give back what they stood on. A second call does nothing."""
        self._triggers.close()
        self.kill_nodes(range(len(self.nodes)))
        if self._backend.has_disks:
            self._copy_from_disks()
        self._backend.close()

    def __enter__(self) -> Cluster:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._triggers.raise_error()
                self._triggers.require_all_done()
        finally:
            self.stop()

    # ---- inside --------------------------------------------------------------------------------------

    def _build_node(self, index: int, *, shared_disk: bool) -> Node:
        name = f"n{index}"
        ckpt_dir = root = self.ckpt_dir
        if not shared_disk:
            ckpt_dir = self.directory / "disks" / name
            root = self._backend.prepare_disk(index, ckpt_dir)
            seen = self.run_dir / name
            seen.parent.mkdir(parents=True, exist_ok=True)
            if not seen.is_symlink():
                seen.symlink_to(root / self.run_id / name)
        log = self.directory / "logs" / f"{name}.log"
        return Node(name, self._backend.address(index), ckpt_dir, root / self.run_id / name, log)

    def _copy_from_disks(self) -> None:
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
