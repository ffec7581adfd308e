"""Run a fault plan against a job on simulated nodes.

`FaultInjector.poll` is called often by the thread that owns the cluster. It injects each fault when it is
due, undoes the faults that end by themselves, and restarts the nodes that are down, as a scheduler would. A
fault with a step is due when any rank has finished it. A fault with a time is due so long after the first
step. A fault with a phase is due when a process waits at the failpoint of that phase.

`resolve_targets` finds the workers or nodes of a fault, `inject` calls the method of `Cluster`, and
`failpoint_entry` describes the faults that a process injects into itself. Each fault is logged to
``faults.jsonl`` when it happens. `FaultInjector.close` ends everything that still lasts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil

from elastic_resume import constants
from elastic_resume.errors import ElasticResumeError, UsageError
from elastic_resume.events import EventLog
from elastic_resume.snapshot.progress_page import ProgressRecord
from elastic_resume.testing import virtual_network
from elastic_resume.testing.cluster import Cluster
from elastic_resume.testing.faults import NODES, WORKER, WORKER_FAILPOINTS, Fault, format_duration
from elastic_resume.testing.triggers import FailpointController

Undo = Callable[[], object]
GARBAGE_BYTES = 4096
GARBAGE_TIMEOUT_S = 2.0
_SEND_GARBAGE_SCRIPT = (
    "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), {s}).sendall({junk})"
)
_LINK_CUTS = ("cut", "cut-out", "cut-in", "partition")  # each ends for itself
_SINGLE_VALUE_FAULTS = ("packet-loss", "slow-link", "slow-disk")  # a node has one at a time


class TargetUnavailableError(Exception):
    """The target of a fault is not there at this moment: dead, or starting."""


@dataclass(frozen=True)
class Target:
    """The target of a fault: a node, or one worker of it. ``node`` is None for several nodes in groups."""

    node: int | None
    local_rank: int | None = None
    rank: int | None = None
    pid: int | None = None  # as its node knows it, of a worker that stands at a point

    def __str__(self) -> str:
        if self.node is None:
            return "the network"
        return f"n{self.node}" if self.rank is None else f"rank {self.rank} on n{self.node}"

    @property
    def node_index(self) -> int:
        """Return the index of the node."""
        if self.node is None:
            raise ValueError("a partition hits no single node")
        return self.node


def resolve_targets(cluster: Cluster, fault: Fault) -> tuple[Target, ...]:
    """Return the targets that ``fault`` has now.

    Raises:
        TargetUnavailableError: there is none at this moment.

    """
    if fault.kind.target == NODES:
        return (Target(None),)
    workers = _find_workers(cluster)
    if fault.kind.target == WORKER:
        found = [one for one in workers.values() if _matches_target(fault, one)]
        if not found:
            raise TargetUnavailableError(f"there is no {fault.target_text}")
        return tuple(found)
    if fault.role == "all":
        nodes = [index for index, node in enumerate(cluster.nodes) if node.alive]
    elif fault.role == "leader":
        nodes = [_find_leader(cluster)]
    elif fault.role == "rank-0":
        nodes = [workers[0].node_index] if 0 in workers else []
    else:
        nodes = [] if fault.node is None else [fault.node]
    if not nodes or not all(cluster.nodes[index].alive for index in nodes):
        raise TargetUnavailableError(f"{fault.target_text} is down")
    return tuple(Target(index) for index in nodes)


def resolve_targets_at_failpoint(
    cluster: Cluster, fault: Fault, process: Mapping[str, object]
) -> tuple[Target, ...]:
    """Return the targets of ``fault`` when a process waits at the failpoint of its phase.

    Raises:
        TargetUnavailableError: another process than the target waits there.

    """
    found = [index for index, node in enumerate(cluster.nodes) if node.name == process.get("node")]
    if fault.kind.target == WORKER and fault.failpoint in WORKER_FAILPOINTS and fault.role != "all" and found:
        local, rank, pid = (int(str(process[name] or 0)) for name in ("local", "rank", "pid"))
        return (Target(found[0], local, rank, pid),)
    targets = resolve_targets(cluster, fault)
    if fault.kind.target != NODES and fault.role != "all" and targets[0].node not in found:
        raise TargetUnavailableError(f"{fault.target_text} was not {fault.phase}")
    return targets


def shared_undo_key(fault: Fault, target: Target) -> tuple[object, ...]:
    """Return what faults have in common that share one undo action; the last of them to end calls it."""
    return () if fault.what in _LINK_CUTS else (fault.what, target)


def reapply(cluster: Cluster, fault: Fault, target: Target) -> None:
    """Apply a lasting fault again after another undo, or a restart of its node, has removed it."""
    if fault.what in _SINGLE_VALUE_FAULTS:
        inject(cluster, fault, target)


def inject(cluster: Cluster, fault: Fault, target: Target) -> Undo | None:
    """Inject the fault; return its undo action if the fault has a duration.

    Raises:
        TargetUnavailableError: the target has just gone, or lacks what the fault needs.

    """
    return _INJECT_FUNCTIONS[fault.what](cluster, fault, target)


def failpoint_entry(fault: Fault) -> str:
    """Return the failpoint of a fault that a process injects into itself; empty for all others."""
    if fault.what == "corrupt-message" and fault.sender == "peer":
        return "rendezvous.line=flip"
    if not fault.kind.in_process:
        return ""
    actions = {
        "raise": f"raise:{fault.error}",
        "exit": f"exit:{fault.code}",
        "slow-rank": f"delay:{fault.delay_s}",
        "skip-collective": "do:skip-collective",
        "out-of-memory": f"out-of-memory:{fault.limit_bytes}",
        "hold-gil": "hold-gil" if fault.for_s is None else f"hold-gil:{fault.for_s}",
    }
    return f"{fault.failpoint or 'step'}={actions[fault.what]}"


def describe_settings(fault: Fault) -> str:
    """Describe the settings of a fault: "for 6s, 5 %"."""
    words: Mapping[str, Callable[[], str]] = {
        "for_s": lambda: f"for {format_duration(fault.for_s or 0)}",
        "signal": lambda: str(fault.signal),
        "error": lambda: str(fault.error),
        "code": lambda: f"code {fault.code}",
        "delay_s": lambda: (
            f"{format_duration(fault.delay_s or 0)} a {'request' if fault.what == 'slow-disk' else 'step'}"
        ),
        "percent": lambda: f"{fault.percent:g} %",
        "bytes_per_s": lambda: f"{(fault.bytes_per_s or 0) / 1e6:g} MB/s",
        "sender": lambda: f"from a {fault.sender}",
    }
    return ", ".join(say() for name, say in words.items() if getattr(fault, name) is not None)


# ---- whom ----------------------------------------------------------------------------------------------


def _find_workers(cluster: Cluster) -> dict[int, Target]:
    """Return the workers of the newest generation, by rank."""
    lines = list(cluster.rank_progress())
    newest = max((line.generation for _, line in lines), default=0)
    return {
        line.worker.rank: Target(index, line.local_rank, line.worker.rank)
        for index, line in lines
        if line.generation == newest and cluster.nodes[index].alive
    }


def _matches_target(fault: Fault, worker: Target) -> bool:
    if fault.role == "all":
        return True
    if fault.node is not None:  # of a node, its lead
        return worker.node == fault.node and worker.local_rank == 0
    return worker.rank == (0 if fault.role == "rank-0" else fault.rank)


def _find_leader(cluster: Cluster) -> int:
    """Return the node whose agent became leader last."""
    names = {node.name: index for index, node in enumerate(cluster.nodes)}
    for event in reversed(cluster.events("rendezvous")):
        if event.get("what") == "leading" and event.get("node") in names:
            return names[event["node"]]
    raise TargetUnavailableError("nobody leads yet")


# ---- what ----------------------------------------------------------------------------------------------


def _signal_worker(cluster: Cluster, target: Target, signal_name: str) -> None:
    try:
        if target.pid is None:
            cluster.kill_worker(target.node_index, target.local_rank or 0, signal.Signals[signal_name])
        else:
            cluster.signal_process(target.node_index, target.pid, signal.Signals[signal_name])
    except (UsageError, OSError, psutil.NoSuchProcess) as error:  # it is dying of something else
        raise TargetUnavailableError(str(error)) from error


def _kill_worker(cluster: Cluster, fault: Fault, target: Target) -> None:
    _signal_worker(cluster, target, fault.signal or "SIGKILL")


def _stop_worker(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del fault
    _signal_worker(cluster, target, "SIGSTOP")

    def go_on() -> None:
        with contextlib.suppress(TargetUnavailableError):  # it has been killed for it
            _signal_worker(cluster, target, "SIGCONT")

    return go_on


def _stop_agent(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del fault
    cluster.kill_agent(target.node_index, signal.SIGSTOP)
    return lambda: cluster.kill_agent(target.node_index, signal.SIGCONT)


def _wipe_disk(cluster: Cluster, fault: Fault, target: Target) -> None:
    del fault
    cluster.kill_node(target.node_index)
    cluster.wipe(target.node_index)


def _cut_links(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    others = [other for other in range(len(cluster.nodes)) if other != target.node_index]
    sent = {(target.node_index, other) for other in others} if fault.what != "cut-in" else set()
    received = {(other, target.node_index) for other in others} if fault.what != "cut-out" else set()
    return cluster.network.silence_links(sent | received)


def _partition(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del target
    return cluster.network.silence_links(
        virtual_network.SilencedLinks(
            virtual_network.assign_sides(fault.groups, len(cluster.nodes))
        ).silent_pairs()
    )


def _lose_packets(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    cluster.lose_packets(target.node_index, fault.percent or 0)
    return lambda: cluster.lose_packets(target.node_index, 0)


def _limit_rate(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    cluster.limit_rate(target.node_index, fault.bytes_per_s or 0)
    return lambda: cluster.limit_rate(target.node_index, 0)


def _fill_disk(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del fault
    cluster.fill_disk(target.node_index)
    return lambda: cluster.free_disk(target.node_index)


def _break_disk(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del fault
    cluster.break_disk(target.node_index)
    return lambda: cluster.mend_disk(target.node_index)


def _slow_disk(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    cluster.slow_disk(target.node_index, fault.delay_s or 0)
    return lambda: cluster.slow_disk(target.node_index, 0)


def _damage_checkpoint(cluster: Cluster, fault: Fault, target: Target) -> None:
    fraction = fault.fraction or 0.0
    try:
        if fault.what == "torn-write":
            cluster.truncate_newest(target.node_index, fraction)
        else:
            cluster.corrupt(target.node_index, fraction)
    except (UsageError, OSError) as error:  # there is none yet, or it was pruned just now
        raise TargetUnavailableError(str(error)) from error


def _send_garbage(cluster: Cluster, fault: Fault, target: Target) -> None:
    """Send garbage to the node's agent without authentication, from another node if nodes have networks."""
    del fault
    host, _, port = cluster.endpoints[target.node_index].rpartition(":")
    junk = os.urandom(GARBAGE_BYTES) + b"\n"
    others = [index for index, node in enumerate(cluster.nodes) if node.alive and index != target.node_index]
    try:
        networks = cluster.network
    except UsageError:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), GARBAGE_TIMEOUT_S) as call,
        ):
            call.sendall(junk)
        return
    code = _SEND_GARBAGE_SCRIPT.format(s=GARBAGE_TIMEOUT_S, junk=junk)
    command = [sys.executable, "-I", "-S", "-c", code, host, port]
    if others:
        subprocess.run(
            networks.wrap_command(others[0], command),
            capture_output=True,
            check=False,
            timeout=4 * GARBAGE_TIMEOUT_S,
        )


_INJECT_FUNCTIONS: Mapping[str, Callable[[Cluster, Fault, Target], Undo | None]] = {
    "kill-worker": _kill_worker,
    "kill-agent": lambda cluster, _, target: cluster.kill_agent(target.node_index),
    "kill-node": lambda cluster, _, target: cluster.kill_node(target.node_index),
    "poweroff": lambda cluster, _, target: cluster.poweroff(target.node_index),
    "stop-worker": _stop_worker,
    "stop-agent": _stop_agent,
    "preemption": lambda cluster, _, target: cluster.give_notice(target.node_index),
    "cut": _cut_links,
    "cut-out": _cut_links,
    "cut-in": _cut_links,
    "partition": _partition,
    "packet-loss": _lose_packets,
    "slow-link": _limit_rate,
    "disk-full": _fill_disk,
    "disk-error": _break_disk,
    "slow-disk": _slow_disk,
    "torn-write": _damage_checkpoint,
    "bit-flip": _damage_checkpoint,
    "wipe-disk": _wipe_disk,
    "corrupt-message": _send_garbage,
}


RESTART_DELAY_S = (
    2.0  # as long as a scheduler takes, at the least, to start a node again that ended by itself
)
ALL_RANKS_WINDOW_S = 5.0  # within which all ranks have come to a point that one has passed
MAX_RESTARTS = 1000  # of one node: a job that ends at each start would be started for ever
INJECTION_ERRORS = (ElasticResumeError, OSError, subprocess.SubprocessError, psutil.Error)
WAITING, ARMED, DONE, FAILED = "waiting", "armed", "done", "failed"


@dataclass
class FaultOutcome:
    """The outcome of one fault.

    ``injected_at`` is the time of the first injection in Unix seconds; ``nodes`` and ``rank`` are its
    targets. Later injections of a fault that repeats are listed apart.
    """

    number: int
    fault: Fault
    is_random: bool = False  # and not written in the plan
    state: str = WAITING
    injection_count: int = 0
    injected_at: float | None = None
    target: str = ""
    nodes: tuple[str, ...] = ()  # that it hit, by name; none of several
    rank: int | None = None  # that it hit, whomever it names
    reason: str = ""  # it has not come, or could not be done
    generation: int = 0  # that it hit last
    failpoint_ids: list[str] = field(default_factory=list)  # of what is armed for it
    repeats: list[tuple[float, tuple[str, ...], int | None]] = field(default_factory=list)


@dataclass(frozen=True)
class _DelayedAction:
    """An action that is due at a time."""

    due_at: float
    description: str
    action: Callable[[], object]
    undo_key: tuple[object, ...] = ()  # until the last of those that have this in common is over
    node: int | None = None
    reapply: Callable[[], object] = lambda: None


class FaultInjector:
    """Injects the faults of a plan into one job."""

    def __init__(
        self,
        cluster: Cluster,
        schedule: Sequence[Fault],
        failpoints: FailpointController,
        log: Callable[[str], None] = lambda _: None,
        written_count: int | None = None,
    ) -> None:
        """Prepare the faults of a plan for a started cluster."""
        last = len(schedule) if written_count is None else written_count
        self.outcomes = [
            FaultOutcome(number, fault, number > last) for number, fault in enumerate(schedule, 1)
        ]
        self._cluster = cluster
        self._failpoints = failpoints
        self._log_message = log
        self._event_log = EventLog(cluster.run_dir / constants.FAULTS_FILE)
        self._first_step_at: float | None = None
        self._generation = 0
        self._delayed_actions: list[_DelayedAction] = []
        self._restart_delays_s: dict[int, float] = {}  # node → seconds that it stays down, once it is
        self._down_since: dict[int, float] = {}  # node → since when
        self._repeating_failpoints: list[str] = []  # marks of what hits every process that comes by
        self._restart_count = 0

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the job's first step; 0 before it."""
        return 0.0 if self._first_step_at is None else time.monotonic() - self._first_step_at

    @property
    def pending(self) -> list[FaultOutcome]:
        """List the faults that are not due yet."""
        return [fate for fate in self.outcomes if fate.state in {WAITING, ARMED}]

    @property
    def is_idle(self) -> bool:
        """Whether no fault lasts and no node is about to be restarted."""
        return not self._delayed_actions and not self._restart_delays_s

    @property
    def is_over(self) -> bool:
        """Whether no agent runs and none will be started."""
        return not any(node.alive for node in self._cluster.nodes) and not self._any_restart_pending()

    def poll(self) -> None:
        """Do everything that is due."""
        lines = [line for _, line in self._cluster.rank_progress()]
        self._generation = max((line.generation for line in lines), default=0)
        if self._first_step_at is None and any(line.step > 0 for line in lines):
            self._first_step_at = time.monotonic()
        for later in [one for one in self._delayed_actions if time.monotonic() >= one.due_at]:
            self._delayed_actions.remove(later)
            still = [
                one for one in self._delayed_actions if later.undo_key and one.undo_key == later.undo_key
            ]
            if not still:
                self._log_message(later.description)
            self._run_and_log_failure(later.description, still[-1].reapply if still else later.action)
        self._restart_nodes()
        for fate in self.outcomes:
            again = fate.fault.repeat and not failpoint_entry(fate.fault)  # those that are armed stay so
            if fate.state == DONE and again and self._generation > fate.generation:
                fate.state = WAITING
            if fate.state == WAITING and self._is_due(fate.fault, lines):
                self._start_fault(fate)
            if fate.state == ARMED:
                self._poll_armed(fate)

    def cancel_pending(self, reason: str) -> None:
        """Cancel the faults that are not due yet. Nodes that are down are still restarted."""
        while self._repeating_failpoints:
            self._failpoints.disarm(self._repeating_failpoints.pop())
        for fate in self.pending:
            self._disarm(fate)
            # One that repeats has come; it is the next time that does not.
            fate.state, fate.reason = (DONE, "") if fate.injection_count else (FAILED, fate.reason or reason)

    def disable_restarts(self) -> None:
        """Restart no node from now on."""
        self._restart_count = MAX_RESTARTS

    def undo_lasting_faults(self) -> None:
        """Undo the faults that last. Nodes that are down are still restarted."""
        for later in self._delayed_actions:
            self._run_and_log_failure(later.description, later.action)
        self._delayed_actions = []

    def close(self) -> None:
        """Cancel and undo everything."""
        self.cancel_pending("the job was over")
        self.undo_lasting_faults()
        self._event_log.close()

    # ---- when ----------------------------------------------------------------------------------------

    def _is_due(self, fault: Fault, progress: Sequence[ProgressRecord]) -> bool:
        if fault.step is not None:
            # A worker looks at its steps itself, and hits that very one.
            return _is_armed_for_step(fault) or any(line.step >= fault.step for line in progress)
        if fault.at_s is not None:
            return self._first_step_at is not None and self.elapsed_s >= fault.at_s
        return True

    def _start_fault(self, outcome: FaultOutcome) -> None:
        """Inject a fault, or arm the failpoint of the process that injects it into itself."""
        fault = outcome.fault
        entry = failpoint_entry(fault)
        outcome.generation = self._generation
        if entry:
            for conditions in _target_conditions(
                fault, len(self._cluster.nodes), self._cluster.workers_per_node
            ):
                step = fault.step if _is_armed_for_step(fault) else None
                mark = self._failpoints.arm(entry, step=step, for_=_failpoint_duration_s(fault), **conditions)
                outcome.failpoint_ids.append(mark)
                if fault.repeat:
                    self._repeating_failpoints.append(
                        self._failpoints.arm(entry, step=step, once="", **conditions)
                    )
            outcome.state = ARMED
        elif fault.phase:
            places = _phase_conditions(fault, len(self._cluster.nodes))
            outcome.failpoint_ids += [
                self._failpoints.arm(f"{fault.failpoint}=wait", **place) for place in places
            ]
            outcome.state = ARMED
        else:
            self._inject_into_targets(outcome)

    def _poll_armed(self, outcome: FaultOutcome) -> None:
        for mark in list(outcome.failpoint_ids):
            if failpoint_entry(outcome.fault):
                who = self._failpoints.read_fired(mark)
                if who is not None:
                    self._schedule_disarm(outcome)
                    rank = int(who["rank"]) if str(who.get("rank", "")).isdecimal() else None
                    node = str(who.get("node", ""))
                    whom = f"rank {rank} on {node}" if rank is not None else node
                    self._record_injection(outcome, whom, (node,), rank, float(who.get("t", time.time())))
                    return
            elif self._failpoints.is_waiting(mark):
                self._inject_into_targets(outcome, self._failpoints.read_fired(mark))
                for one in outcome.failpoint_ids:  # who stands at another by now, too
                    self._failpoints.release(one)
                self._disarm(outcome)
                if outcome.state == ARMED:  # not now: nobody is held for it, and the next time may be
                    outcome.state = WAITING
                return

    def _schedule_disarm(self, outcome: FaultOutcome) -> None:
        """Disarm a failpoint after the fault's duration, or after all ranks had the time to reach it."""
        lasts_s = _failpoint_duration_s(outcome.fault) or (
            ALL_RANKS_WINDOW_S if outcome.fault.role == "all" else 0.0
        )
        if lasts_s:
            marks, outcome.failpoint_ids = outcome.failpoint_ids, []
            what = f"fault {outcome.number} is over: {outcome.fault.what}"
            acts = (partial(self._failpoints.disarm, mark) for mark in marks)
            self._delayed_actions += [_DelayedAction(time.monotonic() + lasts_s, what, act) for act in acts]
        self._disarm(outcome)

    def _disarm(self, outcome: FaultOutcome) -> None:
        for mark in outcome.failpoint_ids:
            self._failpoints.disarm(mark)
        outcome.failpoint_ids = []

    # ---- what ----------------------------------------------------------------------------------------

    def _inject_into_targets(
        self, outcome: FaultOutcome, process: Mapping[str, object] | None = None
    ) -> None:
        """Inject a fault into all targets that are there, while the process at its failpoint waits."""
        fault, now = outcome.fault, time.time()
        try:
            targets = (
                resolve_targets_at_failpoint(self._cluster, fault, process)
                if process
                else resolve_targets(self._cluster, fault)
            )
        except (TargetUnavailableError, *INJECTION_ERRORS) as error:
            outcome.reason = str(error)
            return
        hit = [target for target in targets if self._inject_into(outcome, target)]
        if hit:
            indices = [one.node for one in hit if one.node is not None]
            nodes = [
                node.name for index, node in enumerate(self._cluster.nodes) if index in indices or not indices
            ]
            self._record_injection(outcome, ", ".join(map(str, hit)), tuple(nodes), hit[0].rank, now)

    def _inject_into(self, outcome: FaultOutcome, target: Target) -> bool:
        """Inject a fault into one target; return False if it is not possible now."""
        fault = outcome.fault
        try:
            undo = inject(self._cluster, fault, target)
        except TargetUnavailableError as error:
            outcome.reason = str(error)
            return False
        except INJECTION_ERRORS as error:
            outcome.state, outcome.reason = FAILED, str(error)
            self._log_message(f"fault {outcome.number}: {fault.what} could not be done: {error}")
            return False
        if fault.back_after_s is not None:
            self._restart_delays_s[target.node_index] = fault.back_after_s
        if fault.for_s is not None and undo is not None:
            what = f"fault {outcome.number} is over: {fault.what} {target}"
            shared = shared_undo_key(fault, target)
            renew = partial(reapply, self._cluster, fault, target)
            self._delayed_actions.append(
                _DelayedAction(time.monotonic() + fault.for_s, what, undo, shared, target.node, renew)
            )
        return True

    def _record_injection(
        self, outcome: FaultOutcome, target: str, nodes: tuple[str, ...], rank: int | None, injected_at: float
    ) -> None:
        fault = outcome.fault
        outcome.state, outcome.reason = DONE, ""
        outcome.injection_count += 1
        outcome.generation = self._generation
        target = target if fault.groups == () else fault.target_text
        if outcome.injected_at is None:
            outcome.injected_at, outcome.target, outcome.nodes, outcome.rank = (
                injected_at,
                target,
                nodes,
                rank,
            )
        else:
            outcome.repeats.append((injected_at, nodes, rank))
        set_to = describe_settings(fault)
        message = f"{fault.what} {target}" + (f" ({set_to})" if set_to else "")
        self._log_message(
            f"fault {outcome.number}: {message}" + ("" if fault.at_s is not None else fault.time_text)
        )
        self._event_log.emit(
            "fault",
            number=outcome.number,
            what=fault.what,
            where=target,
            when=fault.time_text.strip(),
            node=nodes[0] if len(nodes) == 1 else "",
            rank=rank,
            message=message,
        )

    def _run_and_log_failure(self, description: str, action: Callable[[], object]) -> None:
        """Run an action and log its failure, so that the job is never left in the midst of a fault."""
        try:
            action()
        except INJECTION_ERRORS as error:
            self._log_message(f"{description}: {error}")

    # ---- who is started again ------------------------------------------------------------------------

    def _any_restart_pending(self) -> bool:
        return any(self._should_restart(index) for index in range(len(self._cluster.nodes)))

    def _should_restart(self, index: int) -> bool:
        if any(self._exit_code(other) == constants.EXIT_SUCCESS for other in range(len(self._cluster.nodes))):
            return False  # the job is over, and would be another one
        code = self._exit_code(index)
        if code is None or self._restart_count >= MAX_RESTARTS:
            return False
        return index in self._restart_delays_s or code not in {constants.EXIT_JOB_ERROR, constants.EXIT_USAGE}

    def _exit_code(self, index: int) -> int | None:
        """Return the exit code of a node's agent; None while it runs or before its first start."""
        agent = self._cluster.nodes[index].agent
        return None if agent is None else agent.poll()

    def _restart_nodes(self) -> None:
        """Restart the nodes that have been down for their time."""
        for index, node in enumerate(self._cluster.nodes):
            if not self._should_restart(index):
                self._down_since.pop(index, None)
                continue
            since = self._down_since.setdefault(index, time.monotonic())
            wait_s = self._restart_delays_s.get(index, RESTART_DELAY_S)
            if time.monotonic() >= since + wait_s:
                self._restart_count += 1
                self._restart_delays_s.pop(index, None)
                self._down_since.pop(index, None)
                self._log_message(f"{node.name} is started again, {format_duration(wait_s)} after its end")
                self._run_and_log_failure(
                    f"{node.name} could not be started", partial(self._cluster.start_node, index)
                )
                for later in [
                    one for one in self._delayed_actions if one.node == index
                ]:  # a start mends the link
                    self._run_and_log_failure(later.description, later.reapply)


def _phase_conditions(fault: Fault, nodes: int) -> list[dict[str, object]]:
    """Return one failpoint condition per process that may be the target of a fault with a phase."""
    if fault.role == "all" or fault.kind.target == NODES:
        return [{}]
    if fault.kind.target == WORKER and fault.failpoint in WORKER_FAILPOINTS:
        return _target_conditions(fault, nodes, 0)
    return [{"node": f"n{node}"} for node in ([fault.node] if fault.node is not None else range(nodes))]


def _target_conditions(fault: Fault, nodes: int, workers: int) -> list[dict[str, object]]:
    """Return one failpoint condition per target."""
    if fault.kind.target != WORKER:
        return [{"node": f"n{node}"} for node in ([fault.node] if fault.node is not None else range(nodes))]
    if fault.role == "all":
        return [{"rank": rank} for rank in range(nodes * workers)]
    if fault.node is not None:
        return [{"node": f"n{fault.node}", "local": 0}]
    return [{"rank": 0 if fault.role == "rank-0" else fault.rank}]


def _is_armed_for_step(fault: Fault) -> bool:
    """Whether the fault's failpoint is the step itself."""
    return failpoint_entry(fault).startswith("step=")


def _failpoint_duration_s(fault: Fault) -> float | None:
    return fault.for_s if fault.what == "slow-rank" else None
