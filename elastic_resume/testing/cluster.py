"""Run one job on several simulated nodes of this machine, and inject faults into them.

A node is a process of this machine, or lives in a network namespace with a link and a small disk of its own
(``hosts="namespaces"``). Each has a name, an address and a directory. It can be killed, cut off, wiped,
damaged and started again; the kernel does each fault for real. A test waits for facts in the nodes' event
logs and never sleeps for a guessed time. When the process that made the cluster ends, the kernel ends the
nodes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import psutil

from elastic_resume import constants, events
from elastic_resume.checkpoint.catalog import Catalog, CatalogEntry
from elastic_resume.errors import UsageError
from elastic_resume.events import Event
from elastic_resume.failpoints import FailpointController
from elastic_resume.report import generations, summary
from elastic_resume.slots import progress_page
from elastic_resume.slots.progress_page import ProgressRecord
from elastic_resume.testing import fork_server
from elastic_resume.testing.backends import Hosts, LoopbackBackend, make_backend
from elastic_resume.testing.virtual_network import VirtualNetwork

T = TypeVar("T")

POLL_S = 0.02
ACTION_POLL_S = 0.002  # while an action is planned: a step of a small model takes a few milliseconds
OUTPUT_TAIL_CHARS = 4000  # characters of each node's output in an error


__all__ = ["Cluster", "ClusterTimeoutError", "Hosts", "Node", "Recovery", "Trigger", "TriggerError"]


class ClusterTimeoutError(AssertionError):
    """A wait failed. The text ends with the last output of each node."""


RankProgress = tuple[int, ProgressRecord]
"""The index of a node, and the progress of one of its ranks."""


class TriggerError(AssertionError):
    """A scheduled action failed, or its step never came."""


@dataclass(frozen=True)
class StepCondition:
    """A rank has finished a step: this rank, or any; on this node, or on any."""

    step: int
    rank: int | None = None
    node: int | None = None

    def __call__(self, progress: Iterable[RankProgress]) -> RankProgress | None:
        """Return the newest progress record that fulfils the condition."""
        matches = [
            (index, record)
            for index, record in progress
            if record.step >= self.step
            and self.rank in (None, record.worker.rank)
            and self.node in (None, index)
        ]
        return max(matches, key=lambda match: (match[1].generation, match[1].step), default=None)

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        node = "" if self.node is None else f" on n{self.node}"
        return f"step {self.step}{rank}{node}"


@dataclass(eq=False)
class ScheduledAction:
    """One action. It gets what its condition returned; if it returns False, it runs again."""

    description: str
    condition: StepCondition
    action: Callable[[RankProgress], object]


class PlannedActions:
    """The actions that a test has planned for one cluster."""

    def __init__(self) -> None:
        self._actions: list[ScheduledAction] = []

    def __len__(self) -> int:
        return len(self._actions)

    def schedule(
        self, description: str, condition: StepCondition, action: Callable[[RankProgress], object]
    ) -> None:
        """Plan an action."""
        self._actions.append(ScheduledAction(f"{description} at {condition}", condition, action))

    def run_due(self, progress: Iterable[RankProgress]) -> None:
        """Run each action that is due, and remove it.

        Raises:
            TriggerError: an action failed; those behind it run the next time.

        """
        records = list(progress) if self._actions else []
        for planned in list(self._actions):
            match = planned.condition(records)
            if match is None:
                continue
            try:
                is_done = planned.action(match) is not False
            except Exception as error:
                self._actions.remove(planned)
                raise TriggerError(f"{planned.description}: {error}") from error
            if is_done:
                self._actions.remove(planned)

    def require_all_done(self) -> None:
        """Raise unless all planned actions have run.

        Raises:
            TriggerError: it names the actions that have not run.

        """
        left, self._actions = ", ".join(planned.description for planned in self._actions), []
        if left:
            raise TriggerError(
                f"{left}: never came. Plan it earlier, train longer, or wait for it (wait_exit)."
            )


@dataclass
class Node:
    """One simulated node.

    ``ckpt_dir`` is the path of the disk as the node sees it. ``directory`` is the path of the node's own
    directory as this process sees it. ``agent`` is None before the first start.
    """

    name: str
    address: str
    ckpt_dir: Path
    directory: Path
    log: Path
    agent: fork_server.AgentProcess | None = None
    killed: bool = False  # the test has killed it since the last start
    exit_collected: bool = False  # `wait_exit` has returned its exit code, since the last start

    @property
    def alive(self) -> bool:
        """Whether the node's agent runs."""
        return self.agent is not None and self.agent.poll() is None


@dataclass(frozen=True)
class Recovery:
    """One failure that the job recovered from, as ``elastic-resume report`` shows it.

    ``generation`` is the one after the failure. ``cause`` is the root cause. ``seconds`` is the time from the
    first sign of the failure to the first step of that generation, None if the logs lack it. ``lost_steps``
    is the number of recomputed steps.
    """

    generation: int
    cause: str
    seconds: float | None
    lost_steps: int | None


class Cluster:
    """Several nodes on this machine that run one job. Use it as a context manager, or call `stop`.

    At its end the context manager raises a `TriggerError` if a planned action never happened.
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
        candidates: int = 3,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        hosts: Hosts | VirtualNetwork | LoopbackBackend = "loopback",
        disk_bytes: int | None = None,
        fresh: bool = False,
    ) -> None:
        """Prepare the cluster; nothing runs before `start`.

        Args:
            directory: gets ``logs/``, ``disks/NODE/`` and ``checkpoints/RUN_ID/``. The last one shows the
                directories of all nodes side by side, as ``elastic-resume report`` expects them.
            nodes: number of nodes; their names are n0 to n{nodes-1}.
            min_nodes: fewest nodes that train; default: ``nodes``.
            max_nodes: most nodes that train; default: ``nodes``.
            workers_per_node: number of local ranks.
            run_id: name of the job.
            candidates: number of nodes that ``--rdzv-endpoint`` names.
            flags: further flags of ``elastic-resume run``.
            env: added to the environment of every node; it overrides what is set here.
            hosts: "loopback" makes each node a process with an address of its own. "namespaces" gives each a
                network and a small disk, and takes root. A `VirtualNetwork` is used and not closed; a backend
                is closed.
            disk_bytes: size of each node's disk with "namespaces"; default: 256 MB.
            fresh: start each agent as a new process that imports torch, as on a real node. Otherwise agents
                are forked from one process that has imported it, which saves seconds.

        Raises:
            MachineError: the backend is not available here.

        """
        self.directory = Path(directory).absolute()
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        (self.directory / "notices").mkdir(exist_ok=True)
        self.run_id = run_id
        self.ckpt_dir = self.directory / "checkpoints"
        self.run_dir = self.ckpt_dir / run_id
        self.workers_per_node = workers_per_node
        self._backend = make_backend(hosts, nodes, disk_bytes)
        self._start_fresh = fresh
        self._planned_actions = PlannedActions()
        self.failpoints = FailpointController(self.directory / "armed")
        self._disk_failpoint_ids: dict[tuple[int, str], str] = {}  # (node index, action) -> failpoint id
        self.nodes = [self._build_node(index) for index in range(nodes)]
        low, high = min_nodes or nodes, max_nodes or nodes
        self._nnodes = f"{low}:{high}" if low != high else str(high)
        self._flags = list(flags)
        self.env = {**self._default_env(), **(env or {})}
        """Environment of every node; a change takes effect at later starts."""
        self.endpoints = [
            f"{node.address}:{self._backend.port(index)}"
            for index, node in enumerate(self.nodes[:candidates])
        ]
        """Addresses at which the candidates' agents listen."""
        self._script: list[str] = []

    # ---- start and stop ----------------------------------------------------------------------------------

    def start(self, script: str | Path, *args: str, only: Sequence[int] | None = None) -> None:
        """Start the job on every node, or on those of ``only``."""
        self._script = [str(script), *args]
        chosen = range(len(self.nodes)) if only is None else only
        for index in chosen:
            self.start_node(index)

    def start_node(self, index: int, env: Mapping[str, str] | None = None, flags: Sequence[str] = ()) -> None:
        """Start the agent of one node, also again; ``env`` and ``flags`` hold for this start only."""
        node = self.nodes[index]
        if node.alive:
            raise UsageError(f"node {node.name} is running already.")
        self._preemption_notice_path(index).unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "elastic_resume", "run"),
            *("--nnodes", self._nnodes, "--nproc-per-node", str(self.workers_per_node)),
            *("--rdzv-id", self.run_id),
            *("--rdzv-endpoint", ",".join(self.endpoints)),
            *("--local-addr", node.address, "--ckpt-dir", str(node.ckpt_dir)),
            *self._flags,
            *flags,
            *self._script,
        ]
        # Failpoints of the agent are chosen by its name.
        of_node = {constants.ENV_NODE_NAME: node.name, **self.env}
        of_node["ELASTIC_RESUME_PREEMPTION_NOTICE"] = f"file:{self._preemption_notice_path(index)}"
        with open(node.log, "ab") as log:
            environ = {**of_node, **(env or {})}
            node.agent = self._backend.start(index, command, environ, log, fresh=self._start_fresh)
        node.killed = node.exit_collected = False

    def stop(self) -> None:
        """Kill all nodes and close the backend. A second call does nothing."""
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
                self._planned_actions.require_all_done()
        finally:
            self.stop()

    # ---- observe -----------------------------------------------------------------------------------

    def events(self, kind: str | None = None) -> list[Event]:
        """Return the events of all nodes by time, or those of one kind. A failing disk gives none."""
        try:
            found = events.read_run(self.run_dir)
        except OSError:
            readable = (event for index in range(len(self.nodes)) for event in self.node_events(index))
            found = sorted(readable, key=lambda event: event["t"])
        return [event for event in found if kind in (None, event["event"])]

    def node_events(self, index: int, kind: str | None = None) -> list[Event]:
        """Return one node's events by time, or those of one kind. A failing disk gives none."""
        with contextlib.suppress(OSError):
            found = events.read(self.nodes[index].directory / constants.EVENTS_FILE)
            wanted = (event for event in found if kind in (None, event["event"]))
            return sorted(wanted, key=lambda event: event["t"])
        return []

    def checkpoints(self, index: int) -> list[CatalogEntry]:
        """List a node's checkpoints, newest first, each with its problem, if it has one."""
        return Catalog(self.nodes[index].directory, self.run_id).list_entries()

    def output(self, index: int) -> str:
        """Return all output of a node's agent and workers."""
        log = self.nodes[index].log
        return log.read_text(errors="replace") if log.exists() else ""

    def processes(self, index: int) -> list[psutil.Process]:
        """List a node's agent and its living descendants."""
        return self._backend.processes(index)

    def process(self, index: int, pid: int) -> psutil.Process | None:
        """Return a node's process, or None if it has ended."""
        return next((one for one in self.processes(index) if one.pid == pid), None)

    def rank_progress(self) -> Iterator[RankProgress]:
        """Yield the node's index and the progress of each rank."""
        for index, node in enumerate(self.nodes):
            path = node.directory / constants.PROGRESS_FILE
            for record in progress_page.read_records(path, self.workers_per_node):
                yield index, record

    @property
    def lost_steps(self) -> int:
        """Count the recomputed steps of all failures so far."""
        return generations.build_history_from_events(self.events()).recomputed_steps

    @property
    def recoveries(self) -> list[Recovery]:
        """List the failures that the job has recovered from so far, in order."""
        rows = generations.build_history_from_events(self.events()).generations
        return [
            Recovery(following.number, row.end.text, row.recovery_s, row.recomputed_steps)
            for row, following in itertools.pairwise(rows)
            if row.end.is_incident
        ]

    def report_text(self) -> str:
        """Return what ``elastic-resume report`` prints for the run so far."""
        return summary.format_text(summary.build_run_report(self.events()))

    def output_tails(self) -> str:
        """Return the end of each node's output."""
        return "\n".join(
            f"--- {n.name}\n{self.output(i)[-OUTPUT_TAIL_CHARS:]}" for i, n in enumerate(self.nodes)
        )

    # ---- wait ----------------------------------------------------------------------------------------

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
        """Wait for an event, or until ``condition`` returns a true value; return the event or the value.

        Args:
            condition: called again and again.
            description: what the condition waits for; part of the error.
            timeout_s: longest wait.
            step: wait until a rank has finished this step or a later one.
            generation: wait until this generation or a later one has resumed; with ``step``: the step is one
                of it.
            commit: wait until a checkpoint of this step or a later one is on a disk.
            node: with ``step`` or ``commit``: on this node.

        Raises:
            ClusterTimeoutError: the time is over, or no node runs any more.
            TriggerError: an action that was planned with `at` failed.

        """
        if condition is None:
            condition, description = self._event_condition(step, generation, commit, node)
        deadline = time.monotonic() + timeout_s
        while True:
            idle = not any(one.alive for one in self.nodes)
            self._planned_actions.run_due(self.rank_progress())
            found = condition()
            if found:
                return found
            if idle or time.monotonic() > deadline:
                why = "no node runs any more" if idle else f"{timeout_s:.0f} s went by"
                raise ClusterTimeoutError(f"{description}: {why}.\n{self.output_tails()}")
            self._sleep()

    def _event_condition(
        self, step: int | None, generation: int | None, commit: int | None, node: int | None
    ) -> tuple[Callable[[], Event | None], str]:
        """Return a condition that finds one event, and its description."""
        if [step is None and generation is None, commit is None].count(False) != 1:
            raise UsageError(
                "wait for step=, for generation=, for both, or for commit=; or give a condition."
            )
        of_generation = "" if generation is None else f" of generation {generation}"
        if commit is not None:
            kind, least, description = "commit", commit, f"a checkpoint of step {commit}"
        elif step is not None:
            kind, least, description = "step", step, f"step {step}{of_generation}"
        else:
            kind, least, description = "resume", 0, f"generation {generation}"
        if node is not None:
            description += f" on {self.nodes[node].name}"

        def condition() -> Event | None:
            found = self.events(kind) if node is None else self.node_events(node, kind)
            matches = (e for e in found if e["step"] >= least and e["generation"] >= (generation or 0))
            return next(matches, None)

        return condition, description

    def wait_exit(self, timeout_s: float = 240.0, only: Sequence[int] | None = None) -> list[int]:
        """Wait until all agents have ended; return the exit codes of those that the test did not kill.

        An exit code is returned once per start. With ``only``: wait for the agents of these nodes, and return
        all of their exit codes.

        Raises:
            UsageError: no node was started.
            ClusterTimeoutError: not within ``timeout_s``.
            TriggerError: an action that was planned with `at` failed, or its step never came.

        """
        if all(one.agent is None for one in self.nodes):
            raise UsageError("wait_exit: no node was started; call start(script) before.")
        chosen = [one for one in self.nodes if one.alive or not one.exit_collected]
        if only is not None:
            chosen = [self.nodes[index] for index in only]
        deadline = time.monotonic() + timeout_s
        while running := [one for one in chosen if one.alive]:
            self._planned_actions.run_due(self.rank_progress())
            if time.monotonic() > deadline:
                names = ", ".join(one.name for one in running)
                raise ClusterTimeoutError(
                    f"{names}: not ended within {timeout_s:.0f} s.\n{self.output_tails()}"
                )
            self._sleep()
        ended = [one for one in chosen if one.agent is not None and (only is not None or not one.killed)]
        codes = [one.agent.wait() for one in ended if one.agent is not None]
        for one in ended:
            one.exit_collected = True
        if not any(one.alive for one in self.nodes) and not any(codes):
            self._planned_actions.require_all_done()
        return codes

    # ---- processes -----------------------------------------------------------------------------------

    def kill_worker(self, index: int, local_rank: int = 0, sig: signal.Signals = signal.SIGKILL) -> int:
        """Send ``sig`` to one worker; return its process id. SIGSTOP makes it hang until SIGCONT."""
        starts = [e for e in self.node_events(index, "worker-start") if e.get("local_rank") == local_rank]
        if not starts:
            raise UsageError(f"node {self.nodes[index].name} has not started a worker {local_rank} yet.")
        return self.signal_process(index, int(starts[-1]["pid"]), sig)

    def signal_process(self, index: int, pid: int, sig: signal.Signals) -> int:
        """Send ``sig`` to a process of a node; return its id."""
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
        """Kill a node: its agent and all that it has started. Its peers see their connections end."""
        self.kill_nodes([index])

    def kill_nodes(self, indices: Sequence[int]) -> None:
        """Kill several nodes in the same moment."""
        for index in indices:
            self.nodes[index].killed = True
        self._backend.crash(indices)

    def poweroff(self, index: int) -> None:
        """Cut a node's power: its link drops all packets, then its processes are killed.

        Its peers see no connection end; they notice the missing heartbeats. `start_node` restores the link.
        """
        self.nodes[index].killed = True
        self._backend.poweroff([index])

    def give_notice(self, index: int) -> None:
        """Give a node a preemption notice, as a cloud does: it saves its state and leaves.

        Its agent polls for the notice once a second. `start_node` removes the notice.
        """
        self._preemption_notice_path(index).touch()

    # ---- links ---------------------------------------------------------------------------------------

    @property
    def network(self) -> VirtualNetwork:
        """Return the virtual network, whose links can be cut."""
        return self._backend.network

    # ---- disks ---------------------------------------------------------------------------------------

    def fill_disk(self, index: int) -> None:
        """Fill a node's disk to the last block: writes fail with ENOSPC until `free_disk`."""
        self._backend.disk(index).fill()

    def free_disk(self, index: int) -> None:
        """Undo `fill_disk`."""
        self._backend.disk(index).free()

    def break_disk(self, index: int) -> None:
        """Fail all disk requests for checkpoints and state files with EIO until `mend_disk`."""
        self._arm_disk_failpoint(index, "raise")

    def mend_disk(self, index: int) -> None:
        """Undo `break_disk`."""
        self._disarm_disk_failpoint(index, "raise")

    def slow_disk(self, index: int, delay_s: float) -> None:
        """Delay each of those requests by ``delay_s``; 0 removes the delay."""
        if delay_s:
            self._arm_disk_failpoint(index, "delay", f":{delay_s}")
        else:
            self._disarm_disk_failpoint(index, "delay")

    def wipe(self, index: int) -> None:
        """Delete the directory of a stopped node: checkpoints, events, all of it.

        Its events are kept beside the nodes' directories: `lost_steps` and the report need them.
        """
        node = self.nodes[index]
        if node.alive:
            raise UsageError(f"node {node.name} is running: kill it before its disk is wiped.")
        with contextlib.suppress(OSError):  # the node has no events, or its disk fails
            lines = (node.directory / constants.EVENTS_FILE).read_bytes().splitlines()
            with open(self.run_dir / constants.FAULTS_FILE, "ab") as log:
                log.write(b"".join(line + b"\n" for line in lines))
        shutil.rmtree(node.directory, ignore_errors=True)

    def truncate_newest(self, index: int, keep_fraction: float = 0.5) -> Path:
        """Truncate a node's newest checkpoint; return the path of its directory."""
        path = self._newest_checkpoint(index).path
        state = path / constants.STATE_FILE
        os.truncate(state, int(state.stat().st_size * keep_fraction))
        return path

    def corrupt(self, index: int, fraction: float = 0.9) -> Path:
        """Flip one bit of a node's newest checkpoint; return the path of its directory.

        ``fraction`` is the position of the bit, as a fraction of the file's size.
        """
        path = self._newest_checkpoint(index).path
        with open(path / constants.STATE_FILE, "r+b") as file:
            place = int(file.seek(0, os.SEEK_END) * fraction)
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))
        return path

    def arm(self, index: int, failpoint: str) -> str:
        """Arm a failpoint for a node's processes and return its id; the first to reach it fires it.

        ``failpoint`` has the form that `elastic_resume.failpoints` documents: "commit.after-data=kill",
        "step=raise;step=20".
        """
        return self.failpoints.arm(failpoint, node=self.nodes[index].name)

    # ---- at a step -----------------------------------------------------------------------------------

    def at(self, *, step: int, rank: int | None = None, node: int | None = None) -> Trigger:
        """Return a trigger for a finished step: ``cluster.at(step=20, rank=1).kill()``.

        It acts while the test is in `wait` or `wait_exit`.

        Args:
            step: this step or a later one, if the later one is seen first. The delay is a few milliseconds.
            rank: of this rank; default: of any.
            node: of a rank on this node; default: on any.

        """
        return Trigger(self, self._planned_actions, StepCondition(step, rank, node))

    # ---- internals -----------------------------------------------------------------------------------

    def _sleep(self) -> None:
        time.sleep(ACTION_POLL_S if self._planned_actions else POLL_S)

    def _newest_checkpoint(self, index: int) -> CatalogEntry:
        found = self.checkpoints(index)
        if not found:
            raise UsageError(f"node {self.nodes[index].name} has no checkpoint.")
        return found[0]

    def _arm_disk_failpoint(self, index: int, action: str, value: str = "") -> None:
        """Arm, for one node, the failpoint that every disk request passes."""
        self._disarm_disk_failpoint(index, action)
        self._disk_failpoint_ids[index, action] = self.failpoints.arm(
            f"disk.request={action}{value}", node=self.nodes[index].name, once=""
        )

    def _disarm_disk_failpoint(self, index: int, action: str) -> None:
        self.failpoints.disarm(self._disk_failpoint_ids.pop((index, action), ""))

    def _preemption_notice_path(self, index: int) -> Path:
        """Return the path of the file that is a node's preemption notice."""
        return self.directory / "notices" / self.nodes[index].name

    def _default_env(self) -> dict[str, str]:
        return {
            **{
                name: text
                for name, text in os.environ.items()
                # For all tests a user may allow slow nodes more time, or count on the steps of each start.
                if not name.startswith(("TORCHELASTIC_", constants.ENV_PREFIX))
                or name in {constants.ENV_NODE_TIMEOUT, constants.ENV_PROVE}
            },
            "GLOO_SOCKET_IFNAME": self._backend.interface,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": self._backend.temporary_dir(self.directory / "tmp"),
            constants.ENV_STEP_MARK_S: "0.1",
            **self.failpoints.env,
        }

    def _build_node(self, index: int) -> Node:
        name = f"n{index}"
        ckpt_dir = self.directory / "disks" / name
        root = self._backend.prepare_disk(index, ckpt_dir)
        link = self.run_dir / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(root / self.run_id / name)
        log = self.directory / "logs" / f"{name}.log"
        return Node(name, self._backend.address(index), ckpt_dir, root / self.run_id / name, log)

    def _copy_from_disks(self) -> None:
        """Copy events and the newest checkpoint of each node before the disks are removed."""
        for index, node in enumerate(self.nodes):
            copy = self.run_dir / node.name
            if not copy.is_symlink():
                continue
            copy.unlink()
            with contextlib.suppress(OSError, shutil.Error):  # wiped, failing, or never used
                known = [entry.path.name for entry in self.checkpoints(index)]
                shutil.copytree(node.directory, copy, ignore=shutil.ignore_patterns(*known[1:], ".tmp-*"))
            node.directory = copy


class Trigger:
    """A step of a job at which actions happen. Each method plans one action and returns at once."""

    def __init__(self, cluster: Cluster, actions: PlannedActions, condition: StepCondition) -> None:
        """See `Cluster.at`."""
        self._cluster, self._actions, self._condition = cluster, actions, condition

    def do(self, action: Callable[..., object], *args: object) -> None:
        """Call ``action(*args)``: a method of the cluster or any other function."""

        def call(_: object) -> None:
            action(*args)

        self._actions.schedule(getattr(action, "__name__", str(action)), self._condition, call)

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Kill the worker of ``rank=`` by this signal, or the whole node of ``node=``."""
        if self._condition.rank is not None:
            signal_worker = partial(self._signal_worker, sig)
            self._actions.schedule(sig.name, self._condition, signal_worker)
        elif self._condition.node is not None and sig == signal.SIGKILL:
            self.do(self._cluster.kill_node, self._condition.node)
        else:
            raise UsageError(
                "at(…).kill() takes rank= (one worker, any signal) or node= (the whole node, SIGKILL)."
            )

    def _signal_worker(self, sig: signal.Signals, match: RankProgress) -> bool:
        """Send a signal to a worker; return False if it is ending, so that its successor gets it."""
        index, progress = match
        process = self._cluster.process(index, progress.worker.pid)
        try:
            if process is not None:
                process.send_signal(sig)
        except psutil.NoSuchProcess:
            return False
        return process is not None
