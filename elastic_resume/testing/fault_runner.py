"""Inject planned faults into a job on simulated nodes.

`FaultInjector.poll` is called often by the thread that owns the cluster. It injects each fault when it is
due, and undoes the faults that end by themselves. It restarts the nodes that are down, as a scheduler would.
A fault with a step is due when any rank has finished it. A fault with a time is due so long after the first
step.

`resolve_targets` finds the workers or nodes of a fault, and `inject` calls the method of `Cluster`.
`failpoint_entry` describes the faults that a process injects into itself. Each fault is logged to
``faults.jsonl`` when it happens. `FaultInjector.close` ends everything that still lasts.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil

from elastic_resume import constants
from elastic_resume.errors import ElasticResumeError, UsageError
from elastic_resume.events import EventLog
from elastic_resume.testing import virtual_network
from elastic_resume.testing.cluster import Cluster, RankProgress
from elastic_resume.testing.faults import (
    NODES,
    WORKER,
    Fault,
    format_duration,
)

logger = logging.getLogger(__name__)

Undo = Callable[[], object]
RESTART_DELAY_S = 2.0  # the shortest time in which a scheduler restarts a node that ended by itself
ALL_RANKS_WINDOW_S = 5.0  # after one rank has passed a failpoint, all others reach it within this time
MAX_RESTARTS = 1000  # for all nodes together; limits a job that ends at each start
INJECTION_ERRORS = (ElasticResumeError, OSError, subprocess.SubprocessError, psutil.Error)
WAITING, ARMED, DONE, FAILED = "waiting", "armed", "done", "failed"


class TargetUnavailableError(Exception):
    """The target of a fault is not there at this moment: dead, or starting."""


@dataclass(frozen=True)
class Target:
    """The target of a fault: a node, or one worker of it. ``node`` is None for several nodes in groups."""

    node: int | None
    local_rank: int | None = None
    rank: int | None = None

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


def inject(cluster: Cluster, fault: Fault, target: Target) -> Undo | None:
    """Inject the fault; return its undo action if the fault has a duration.

    Raises:
        TargetUnavailableError: the target has just gone, or lacks what the fault needs.

    """
    if fault.what in _LASTING_FAULTS:
        begin, end = _LASTING_FAULTS[fault.what]
        begin(cluster, target.node_index, fault)
        return partial(end, cluster, target.node_index)
    if fault.kind.method:
        getattr(cluster, fault.kind.method)(target.node_index)
        return None
    return _INJECT_FUNCTIONS[fault.what](cluster, fault, target)


def failpoint_entry(fault: Fault) -> str:
    """Return the failpoint of a fault that a process injects into itself; empty for all others."""
    if not fault.kind.in_process:
        return ""
    if fault.what == "corrupt-message":
        return "rendezvous.line=flip"
    actions = {
        "raise": f"raise:{fault.error}",
        "exit": f"exit:{fault.code}",
        "slow-rank": f"delay:{fault.delay_s}",
        "skip-collective": "do:skip-collective",
        "wrong-gradients": "do:wrong-gradients",
        "out-of-memory": f"out-of-memory:{fault.limit_bytes}",
        "hold-gil": "hold-gil" if fault.for_s is None else f"hold-gil:{fault.for_s}",
    }
    point = "between-steps" if fault.what == "slow-rank" else "step"
    return f"{point}={actions[fault.what]}"


def describe_settings(fault: Fault) -> str:
    """Describe the settings of a fault: "for 6s, percent 5"."""
    values = {name: getattr(fault, name) for name in fault.kind.settings if name != "back_after_s"}
    return ", ".join(
        f"{name[:-2]} {format_duration(value)}" if name in {"for_s", "delay_s"} else f"{name} {value}"
        for name, value in values.items()
        if value is not None
    )


# ---- targets ----------------------------------------------------------------------------------------------


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
    if fault.node is not None:  # a fault of a node hits its local rank 0
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
        cluster.kill_worker(target.node_index, target.local_rank or 0, signal.Signals[signal_name])
    except (UsageError, OSError, psutil.NoSuchProcess) as error:  # the worker is ending for another reason
        raise TargetUnavailableError(str(error)) from error


def _kill_worker(cluster: Cluster, fault: Fault, target: Target) -> None:
    _signal_worker(cluster, target, fault.signal or "SIGKILL")


def _stop_worker(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del fault
    _signal_worker(cluster, target, "SIGSTOP")

    def resume() -> None:
        with contextlib.suppress(TargetUnavailableError):  # it was killed, as a hang
            _signal_worker(cluster, target, "SIGCONT")

    return resume


def _wipe_disk(cluster: Cluster, fault: Fault, target: Target) -> None:
    del fault
    cluster.kill_node(target.node_index)
    cluster.wipe(target.node_index)


def _cut_links(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    links = virtual_network.links_of(target.node_index, len(cluster.nodes))
    if fault.what != "cut":
        side = 0 if fault.what == "cut-out" else 1
        links = frozenset(link for link in links if link[side] == target.node_index)
    return cluster.network.silence_links(links)


def _partition(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del target
    return cluster.network.silence_links(virtual_network.links_between(fault.groups, len(cluster.nodes)))


def _damage_checkpoint(cluster: Cluster, fault: Fault, target: Target) -> None:
    damage = cluster.truncate_newest if fault.what == "torn-write" else cluster.corrupt
    try:
        damage(target.node_index)
    except (UsageError, OSError) as error:  # there is no checkpoint yet, or it was just pruned
        raise TargetUnavailableError(str(error)) from error


_INJECT_FUNCTIONS: Mapping[str, Callable[[Cluster, Fault, Target], Undo | None]] = {
    "kill-worker": _kill_worker,
    "stop-worker": _stop_worker,
    "cut": _cut_links,
    "cut-out": _cut_links,
    "cut-in": _cut_links,
    "partition": _partition,
    "torn-write": _damage_checkpoint,
    "bit-flip": _damage_checkpoint,
    "wipe-disk": _wipe_disk,
}
_LASTING_FAULTS: Mapping[
    str, tuple[Callable[[Cluster, int, Fault], object], Callable[[Cluster, int], object]]
] = {
    "stop-agent": (
        lambda cluster, node, _: cluster.kill_agent(node, signal.SIGSTOP),
        lambda cluster, node: cluster.kill_agent(node, signal.SIGCONT),
    ),
    "packet-loss": (
        lambda cluster, node, fault: cluster.network.lose_packets(node, fault.percent or 0),
        lambda cluster, node: cluster.network.lose_packets(node, 0),
    ),
    "slow-link": (
        lambda cluster, node, fault: cluster.network.limit_rate(node, fault.bytes_per_s or 0),
        lambda cluster, node: cluster.network.limit_rate(node, 0),
    ),
    "slow-disk": (
        lambda cluster, node, fault: cluster.slow_disk(node, fault.delay_s or 0),
        lambda cluster, node: cluster.slow_disk(node, 0),
    ),
    "disk-full": (
        lambda cluster, node, _: cluster.fill_disk(node),
        lambda cluster, node: cluster.free_disk(node),
    ),
    "disk-error": (
        lambda cluster, node, _: cluster.break_disk(node),
        lambda cluster, node: cluster.mend_disk(node),
    ),
}
"""Faults of a node that last: what begins one, and what ends it."""


# ---- when ----------------------------------------------------------------------------------------------


@dataclass
class FaultOutcome:
    """The outcome of one fault.

    ``injected_at`` is the time of the injection in Unix seconds; ``nodes`` and ``rank`` are its
    targets.
    """

    number: int
    fault: Fault
    state: str = WAITING
    injected_at: float | None = None
    target: str = ""
    nodes: tuple[str, ...] = ()  # names of the nodes that were hit; empty for several
    rank: int | None = None  # the rank that was hit, also if the fault names another target
    reason: str = ""  # why the fault was not injected
    generation: int = 0  # the generation that was hit last
    failpoint_ids: list[str] = field(default_factory=list)  # failpoints that are armed for this fault


@dataclass(frozen=True)
class _LastingEffect:
    """An action that ends a lasting fault at a time."""

    due_at: float
    description: str
    action: Callable[[], object]


class FaultInjector:
    """Injects planned faults into one job."""

    def __init__(self, cluster: Cluster, faults: Sequence[Fault]) -> None:
        """Prepare the faults for a started cluster."""
        self.outcomes = [FaultOutcome(number, fault) for number, fault in enumerate(faults, 1)]
        self._cluster = cluster
        self._failpoints = cluster.failpoints
        self._event_log = EventLog(cluster.run_dir / constants.FAULTS_FILE)
        self._first_step_at: float | None = None
        self._generation = 0
        self._lasting_effects: list[_LastingEffect] = []
        self._restart_delays_s: dict[int, float] = {}  # node index -> delay after its end
        self._down_since: dict[int, float] = {}  # node index -> time at which the node went down
        self._restart_count = 0

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the job's first step; 0 before it."""
        return 0.0 if self._first_step_at is None else time.monotonic() - self._first_step_at

    @property
    def pending(self) -> list[FaultOutcome]:
        """List the faults that are not due yet."""
        return [outcome for outcome in self.outcomes if outcome.state in {WAITING, ARMED}]

    @property
    def is_idle(self) -> bool:
        """Whether no fault lasts and no node is about to be restarted."""
        return not self._lasting_effects and not self._restart_delays_s

    @property
    def is_over(self) -> bool:
        """Whether no agent runs and none will be started."""
        nodes = self._cluster.nodes
        return not any(node.alive or self._should_restart(index) for index, node in enumerate(nodes))

    def poll(self) -> None:
        """Do everything that is due."""
        progress = list(self._cluster.rank_progress())
        self._generation = max((record.generation for _, record in progress), default=0)
        if self._first_step_at is None and any(record.step > 0 for _, record in progress):
            self._first_step_at = time.monotonic()
        self._undo_expired_faults()
        self._restart_nodes()
        for outcome in self.pending:
            if outcome.state == ARMED or self._is_due(outcome.fault, progress):
                self._advance(outcome)

    def cancel_pending(self, reason: str) -> None:
        """Cancel the faults that are not due yet. Nodes that are down are still restarted."""
        for outcome in self.pending:
            self._disarm(outcome)
            outcome.state, outcome.reason = FAILED, outcome.reason or reason

    def undo_lasting_faults(self) -> None:
        """Undo the faults that last. Nodes that are down are still restarted."""
        for undo in self._lasting_effects:
            self._run_and_log_failure(undo.description, undo.action)
        self._lasting_effects = []

    def close(self) -> None:
        """Cancel and undo everything."""
        self.cancel_pending("the job was over")
        self.undo_lasting_faults()
        self._event_log.close()

    # ---- when ----------------------------------------------------------------------------------------

    def _is_due(self, fault: Fault, progress: Sequence[RankProgress]) -> bool:
        if _is_armed_for_step(fault):  # a worker counts its own steps
            return True
        if fault.step is not None:
            return any(record.step >= fault.step for _, record in progress)
        return self._first_step_at is not None and self.elapsed_s >= (fault.at_s or 0.0)

    def _advance(self, outcome: FaultOutcome) -> None:
        """Start a fault that is due, or poll its failpoint."""
        if outcome.state != ARMED:
            self._start_fault(outcome)
        if outcome.state == ARMED:
            self._poll_armed(outcome)

    def _start_fault(self, outcome: FaultOutcome) -> None:
        """Inject a fault, or arm the failpoint of the process that injects it into itself."""
        fault, nodes = outcome.fault, len(self._cluster.nodes)
        entry = failpoint_entry(fault)
        outcome.generation = self._generation
        if entry:
            step = fault.step if _is_armed_for_step(fault) else None
            for conditions in _target_conditions(fault, nodes, self._cluster.workers_per_node):
                failpoint_id = self._failpoints.arm(
                    entry, step=step, for_=_failpoint_duration_s(fault), **conditions
                )
                outcome.failpoint_ids.append(failpoint_id)
            outcome.state = ARMED
        else:
            self._inject_into_targets(outcome)

    def _poll_armed(self, outcome: FaultOutcome) -> None:
        for failpoint_id in outcome.failpoint_ids:
            fired = self._failpoints.read_fired(failpoint_id)
            if fired is not None:
                self._schedule_disarm(outcome)
                rank = int(fired["rank"]) if str(fired.get("rank", "")).isdecimal() else None
                node = str(fired.get("node", ""))
                target = f"rank {rank} on {node}" if rank is not None else node
                injected_at = float(fired.get("t", time.time()))
                self._record_injection(outcome, target, (node,), rank, injected_at)
                return

    def _schedule_disarm(self, outcome: FaultOutcome) -> None:
        """Disarm a failpoint after the fault's duration, or after all ranks had the time to reach it."""
        window_s = ALL_RANKS_WINDOW_S if outcome.fault.role == "all" else 0.0
        lasts_s = _failpoint_duration_s(outcome.fault) or window_s
        if lasts_s:
            ids, outcome.failpoint_ids = outcome.failpoint_ids, []
            description = f"fault {outcome.number} is over: {outcome.fault.what}"
            self._lasting_effects += [
                _LastingEffect(time.monotonic() + lasts_s, description, partial(self._failpoints.disarm, one))
                for one in ids
            ]
        self._disarm(outcome)

    def _disarm(self, outcome: FaultOutcome) -> None:
        for failpoint_id in outcome.failpoint_ids:
            self._failpoints.disarm(failpoint_id)
        outcome.failpoint_ids = []

    # ---- what ----------------------------------------------------------------------------------------

    def _inject_into_targets(self, outcome: FaultOutcome) -> None:
        """Inject a fault into all targets that are there."""
        fault, now = outcome.fault, time.time()
        try:
            targets = resolve_targets(self._cluster, fault)
        except (TargetUnavailableError, *INJECTION_ERRORS) as error:
            outcome.reason = str(error)
            return
        hit = [target for target in targets if self._inject_into(outcome, target)]
        if hit:
            indices = [target.node for target in hit if target.node is not None]
            nodes = self._cluster.nodes
            names = tuple(node.name for index, node in enumerate(nodes) if index in indices or not indices)
            self._record_injection(outcome, ", ".join(map(str, hit)), names, hit[0].rank, now)

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
            logger.info("fault %d: %s could not be injected: %s", outcome.number, fault.what, error)
            return False
        if fault.back_after_s is not None:
            self._restart_delays_s[target.node_index] = fault.back_after_s
        if fault.for_s is not None and undo is not None:
            self._lasting_effects.append(
                _LastingEffect(
                    time.monotonic() + fault.for_s,
                    f"fault {outcome.number} is over: {fault.what} {target}",
                    undo,
                )
            )
        return True

    def _record_injection(
        self, outcome: FaultOutcome, target: str, nodes: tuple[str, ...], rank: int | None, injected_at: float
    ) -> None:
        fault = outcome.fault
        outcome.state, outcome.reason = DONE, ""
        outcome.generation = self._generation
        target = fault.target_text if fault.groups else target
        outcome.injected_at, outcome.target = injected_at, target
        outcome.nodes, outcome.rank = nodes, rank
        settings = describe_settings(fault)
        message = f"{fault.what} {target}" + (f" ({settings})" if settings else "")
        when = "" if fault.at_s is not None else fault.time_text
        logger.info("fault %d: %s%s", outcome.number, message, when)
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

    def _undo_expired_faults(self) -> None:
        for undo in [one for one in self._lasting_effects if time.monotonic() >= one.due_at]:
            self._lasting_effects.remove(undo)
            logger.info(undo.description)
            self._run_and_log_failure(undo.description, undo.action)

    def _run_and_log_failure(self, description: str, action: Callable[[], object]) -> None:
        """Run an action and log its failure, so that no other fault of the job stays in force."""
        try:
            action()
        except INJECTION_ERRORS as error:
            logger.info("%s: %s", description, error)

    # ---- restarts of nodes ---------------------------------------------------------------------------

    def _should_restart(self, index: int) -> bool:
        codes = [None if node.agent is None else node.agent.poll() for node in self._cluster.nodes]
        if constants.EXIT_SUCCESS in codes:
            return False  # the job is over; a restarted node would begin another job
        if codes[index] is None or self._restart_count >= MAX_RESTARTS:
            return False
        failed = codes[index] in {constants.EXIT_JOB_ERROR, constants.EXIT_USAGE}
        return index in self._restart_delays_s or not failed

    def _restart_nodes(self) -> None:
        """Restart the nodes that have been down for their time."""
        for index, node in enumerate(self._cluster.nodes):
            if not self._should_restart(index):
                self._down_since.pop(index, None)
                continue
            since = self._down_since.setdefault(index, time.monotonic())
            wait_s = self._restart_delays_s.get(index, RESTART_DELAY_S)
            if time.monotonic() < since + wait_s:
                continue
            self._restart_count += 1
            self._restart_delays_s.pop(index, None)
            self._down_since.pop(index, None)
            logger.info("%s is started again %s after its end", node.name, format_duration(wait_s))
            start = partial(self._cluster.start_node, index)
            self._run_and_log_failure(f"{node.name} could not be started", start)


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
    """Whether the fault's failpoint is the step itself, whose number the worker compares."""
    return fault.step is not None and failpoint_entry(fault).startswith(("step=", "between-steps="))


def _failpoint_duration_s(fault: Fault) -> float | None:
    return fault.for_s if fault.what == "slow-rank" else None
