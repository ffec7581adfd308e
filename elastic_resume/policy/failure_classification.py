"""Classify failures by kind, and separate root causes from secondary failures.

`classify_failures` turns the events that one node wrote in a generation into failures. Each node reports one
to the leader. The leader adds the nodes that it lost, and sends all of them to every node in the order of
arrival. `separate_root_causes` decides which of them are root causes.

When a worker dies, its peers' connections break and they fail too, often before the leader has seen the first
death. So an error about a lost connection is secondary if any other failure is known, whichever arrived
first. If there is no other failure, the first of them is the root cause. An error of CUDA or ROCm is never
secondary, even if an error of NCCL reports it (`gpu_faults`).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_resume.events import Event
from elastic_resume.policy.gpu_faults import (
    GpuError,
    GpuFault,
    find_gpu_error,
    summarize_error_text,
)
from elastic_resume.policy.reasons import NodeLost, NodesUnreachable, Signalled, from_json, name_nodes
from elastic_resume.policy.stalls import Activity, Stall
from elastic_resume.units import to_printable

EXCEPTION, EXIT, SIGNAL, OOM = "exception", "exit", "signal", "oom"
HANG, DIVERGENCE, DISK, GPU, STUCK = "hang", "divergence", "disk", "gpu", "stuck"
HARDWARE = "hardware"
"""The worker reports that its machine computes wrongly. A GPU that its driver calls broken is a `GPU`."""
NODE_LOST, PREEMPTED, NETWORK = "node-lost", "preempted", "network"
FAILURE_KINDS = (
    EXCEPTION, EXIT, SIGNAL, OOM, HANG, DIVERGENCE, DISK, GPU, HARDWARE, STUCK, NODE_LOST, PREEMPTED,
    NETWORK,
)  # fmt: skip
NODE_FAILURE_KINDS = frozenset({NODE_LOST, PREEMPTED, NETWORK})
"""Kinds that say nothing about a worker: the node came or went, or two nodes cannot reach each other."""
NOT_PROVED = "not-proved"
"""No failure: the workers' resume was not proved, or they failed meanwhile. They go back to a kept state."""
_SECONDARY_PATTERN = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|remote worker|remote process|"
    r"ncclremoteerror|gloo|nccl|dist(backend|network|store)error|sendbytes|recvvalue|socket ?timeout|"
    r"store->get|watchdog",
    re.IGNORECASE,
)
# NCCL names so what no peer has caused: its wrong use, and a container with little shared memory.
_NCCL_SETUP_PATTERN = re.compile(r"invalid usage|shared memory segment", re.IGNORECASE)
_OWN_DISK_ERRORS = frozenset({"MachineError", "NodeLockedError", "NodeFileError"})
# Python's OSError begins its text so for ENOSPC, EDQUOT, EROFS and EIO.
_DISK_ERROR_PATTERN = re.compile(r"\[Errno (28|122|30|5)\]")
# torch's @record and Python itself begin the text of an exception so.
_EXCEPTION_PATTERN = re.compile(
    r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)): ?(.*)", re.DOTALL
)
_SIGKILL_EXIT_CODE = 137  # a shell reports a child that SIGKILL ended as 128 + 9
# Of a DataLoader, subprocess, concurrent.futures and the datasets library.
_CHILD_KILLED_PATTERN = re.compile(
    r"killed by signal: Killed|SIGKILL|exited unexpectedly|terminated abruptly|abruptly died"
)
_NUMBER_PATTERN = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """The memory of this node during a generation, as `agent.failure_evidence` measured it.

    ``oom_kills`` is the increase of the kernel's count of processes killed for memory. ``used_bytes`` of
    ``limit_bytes`` were in use, by the workers' control group or else the machine; 0 if memory was not short.
    """

    oom_kills: int = 0
    used_bytes: int = 0
    limit_bytes: int = 0
    is_control_group: bool = False

    @property
    def is_short(self) -> bool:
        """Whether a process may have been killed for memory."""
        return self.oom_kills > 0 or self.limit_bytes > 0


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker's process ended; ``memory`` explains a kill for lack of memory."""

    exit_code: int | None = None
    signal: str = ""
    memory: MemoryPressure | None = None


FailureCause = WorkerEnd | Stall | NodeLost | NodesUnreachable | GpuFault


@dataclass(frozen=True, slots=True)
class Failure:
    """One observed failure. It is sent to other nodes, so its fields are plain and its texts are bounded."""

    kind: str
    node: str
    rank: int | None
    cause: FailureCause | None = None
    type: str = ""
    """The exception's class."""
    message: str = ""
    """The first line of its message; before it the cause that NCCL names further below."""
    frame: str = ""
    """Where in the user's code it was raised."""
    step: int | None = None
    """The last step that the worker had finished; None before training began."""
    is_deterministic: bool = False
    """The worker reported that a restart would meet the same error."""
    nodes: int = 1
    """The number of nodes with a like failure."""
    gpu_error: GpuError | None = None
    """What its exception reports of a GPU."""
    is_worth_requeue: bool = False
    """The worker reported that another start, some time later, may not meet the error."""

    @property
    def is_secondary(self) -> bool:
        """Whether it looks like the effect of a lost peer on a living worker."""
        if self.kind == SIGNAL:
            return self.is_abort  # NCCL's watchdog aborts the process when a peer is gone
        if isinstance(self.cause, Stall):
            return self.cause.activity is Activity.OTHER_NODE
        if self.type == "OtherRankFailedError":
            return True
        is_text_judged = self.kind in {EXCEPTION, EXIT} and self.gpu_error is None
        return is_text_judged and looks_secondary(f"{self.type} {self.message}")

    @property
    def is_abort(self) -> bool:
        """Whether the process ended itself by SIGABRT."""
        return self.kind == SIGNAL and self._signal == "SIGABRT"

    @property
    def signature(self) -> tuple[str, str, str, str]:
        """Return a key that ignores numbers: ranks, addresses, process ids."""
        detail = self.cause.activity.value if isinstance(self.cause, Stall) else self._signal
        return (self.kind, self.type, self.frame, _NUMBER_PATTERN.sub("#", self.message) or detail)

    @property
    def _signal(self) -> str:
        return self.cause.signal if isinstance(self.cause, WorkerEnd) else ""


@dataclass(frozen=True, slots=True)
class FailureVerdict:
    """The failures of a generation, separated into root causes and secondary failures."""

    root_causes: tuple[Failure, ...] = ()
    secondary_failures: tuple[Failure, ...] = ()

    @property
    def root_cause(self) -> Failure | None:
        """Return the first root cause, or None."""
        return self.root_causes[0] if self.root_causes else None

    @property
    def is_certain(self) -> bool:
        """Whether the first root cause is known not to be the effect of a lost peer.

        An abort is the effect of another failure only if it is not the first.
        """
        root = self.root_cause
        return root is not None and (root.is_abort or not root.is_secondary)


def looks_secondary(text: str) -> bool:
    """Whether an error's text looks like the effect of a lost peer."""
    return _SECONDARY_PATTERN.search(text) is not None and _NCCL_SETUP_PATTERN.search(text) is None


def separate_root_causes(failures: Iterable[Failure]) -> FailureVerdict:
    """Separate root causes from secondary failures. ``failures`` are in order of arrival.

    Deterministic failures come before all others, then broken machines and nodes that cannot reach others.
    """
    listed = sorted(
        failures,
        key=lambda failure: (not failure.is_deterministic, failure.kind not in {GPU, HARDWARE, NETWORK}),
    )
    causes = [failure for failure in listed if failure.is_deterministic or not failure.is_secondary]
    if not causes:
        causes = listed[:1]
    return FailureVerdict(tuple(causes), tuple(failure for failure in listed if failure not in causes))


def make_node_failure(lost: NodeLost) -> Failure:
    """Make the failure of a lost node. One that a signal had asked to leave was preempted."""
    return Failure(PREEMPTED if isinstance(lost.departure, Signalled) else NODE_LOST, lost.node, None, lost)


def make_network_failure(node: str, peers: Sequence[str]) -> Failure:
    """Make the failure of a node that cannot reach some of the others."""
    return Failure(NETWORK, node, None, NodesUnreachable(node, name_nodes(peers)))


def truncate_failure(failure: Failure) -> Failure:
    """Limit the length of its texts and remove control characters."""
    return replace(
        failure,
        kind=to_printable(failure.kind, 32),
        type=to_printable(failure.type, 100),
        message=to_printable(failure.message),
        frame=to_printable(failure.frame),
    )


MAX_FAILURES = 8
"""Different failures kept of one generation."""


def bound_failures(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Limit the number and the length of failures received from a leader."""
    return tuple(truncate_failure(failure) for failure in failures[:MAX_FAILURES])


class FailureLog:
    """The first failures of the newest generation, in order of arrival.

    It keeps one failure of each node and counts equal failures as one. So if a thousand workers meet the same
    error, every node receives it once. `policy.failure_classification.separate_root_causes` decides what they
    mean.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._reported_nodes: set[str] = set()
        self._failures: list[Failure] = []

    def record(self, generation: int, failure: Failure) -> None:
        """Keep a failure of that generation, unless its node has reported another."""
        if generation < self.generation:
            return
        if generation > self.generation:
            self.generation, self._reported_nodes, self._failures = generation, set(), []
        if failure.node in self._reported_nodes:
            return
        self._reported_nodes.add(failure.node)
        for place, kept in enumerate(self._failures):
            # The failure of a whole node has no rank; it is named and never counted as "one more".
            if kept.rank is not None and kept.signature == failure.signature:
                self._failures[place] = replace(kept, nodes=kept.nodes + 1)
                return
        if len(self._failures) == MAX_FAILURES:
            # Secondary failures may arrive before their root cause, and from every node.
            secondary = next((kept for kept in reversed(self._failures) if kept.is_secondary), None)
            if secondary is None or failure.is_secondary:
                return
            self._failures.remove(secondary)
        self._failures.append(replace(truncate_failure(failure), nodes=1))

    def get_failures(self, generation: int) -> tuple[Failure, ...]:
        """Return the failures that ended that generation, as far as known."""
        return tuple(self._failures) if generation == self.generation else ()


# ---- from the events of one node -----------------------------------------------------------------------


def classify_failures(
    events: Iterable[Event], node: str, memory_pressure: MemoryPressure | None = None
) -> tuple[Failure, ...]:
    """Return the failures of one node's workers in a generation; see `classify_with_times`."""
    return tuple(failure for _, failure in classify_with_times(events, node, memory_pressure))


def classify_with_times(
    events: Iterable[Event], node: str, memory_pressure: MemoryPressure | None = None
) -> tuple[tuple[float, Failure], ...]:
    """Return the failures of one node's workers with their times, root causes first, each group by time.

    A worker that was asked to stop did not fail, nor did one that then lost a peer that was stopped with it.
    A worker that was killed for a hang is covered by the hang. A broken GPU covers the failure of its worker.
    """
    events, memory_pressure = list(events), memory_pressure or MemoryPressure()
    reports = [event for event in events if event["event"] == "failure"]
    hangs = _unresolved_hangs(events)
    found: list[tuple[float, Failure]] = []
    for hang in hangs:
        suspects, step = _parse_suspects(hang), _count_or_none(hang.get("step"))
        is_killed = any(_was_killed_for(hang, event) for event in events)
        if is_killed or not hang.get("kill_delay_s"):  # else another node ended the generation first
            found += [(hang["t"], _hang_failure(suspect, step, node)) for suspect in suspects]
        if is_killed and not suspects:
            waits = Stall(Activity.OTHER_NODE)
            found.append((hang["t"], Failure(HANG, node, _hang_ranks(hang)[0], waits, step=step)))
    for end in events:
        if end["event"] != "worker-exit" or not (end.get("stuck") or _failed_by_itself(end)):
            continue
        report = next((report for report in reports if _is_same_worker(report, end)), None)
        if report is not None:
            reports.remove(report)
        if any(_was_killed_for(hang, end) for hang in hangs):
            continue
        t = end["t"] if report is None else min(report["t"], end["t"])
        found.append((t, _classify_exit(end, report or {}, node, memory_pressure)))
    stops = [event["stopped_at"] for event in events if isinstance(event.get("stopped_at"), float)]
    for report in reports:
        failure = _classify_exception(report, {}, node, memory_pressure)
        if not (failure.is_secondary and report["t"] >= min(stops, default=math.inf)):
            found.append((report["t"], failure))
    found = _find_broken_gpus(events, found, node)
    found.sort(key=lambda pair: (pair[1].kind != GPU, pair[1].is_secondary, pair[0]))
    found.sort(key=lambda pair: not pair[1].is_deterministic)
    return tuple((t, truncate_failure(failure)) for t, failure in found)


def _find_broken_gpus(
    events: Sequence[Event], found: Sequence[tuple[float, Failure]], node: str
) -> list[tuple[float, Failure]]:
    """Return the failures, those of broken GPUs as such, and further GPUs whose driver reports a fault."""
    starts = [event for event in events if event["event"] == "worker-start"]
    ranks = {_count_or_none(event.get("local_rank")): _count_or_none(event.get("rank")) for event in starts}
    faults = [(event["t"], _read_gpu_fault(event)) for event in events if event["event"] == "gpu-fault"]
    judged = []
    for t, failure in found:
        start = next((event for event in starts if event.get("rank") == failure.rank), {})
        local_rank = _count_or_none(start.get("local_rank"))
        own = [pair for pair in faults if local_rank is not None and pair[1].local_rank == local_rank]
        faults = [pair for pair in faults if pair not in own]
        if own or failure.gpu_error is GpuError.HARDWARE:
            fault = own[0][1] if own else GpuFault(local_rank, uuid=_read_name(start.get("gpu")))
            failure = replace(  # noqa: PLW2901 - the same, better known
                failure, kind=GPU, cause=fault, gpu_error=GpuError.HARDWARE
            )
        judged.append((t, failure))
    unseen = {fault.local_rank: (t, fault) for t, fault in reversed(faults)}
    return judged + [
        (t, Failure(GPU, node, ranks.get(fault.local_rank), fault, gpu_error=GpuError.HARDWARE))
        for t, fault in unseen.values()
    ]


def _read_gpu_fault(event: Event) -> GpuFault:
    return GpuFault(
        _count_or_none(event.get("local_rank")),
        _count_or_none(event.get("index")),
        _read_name(event.get("uuid")),
        _count_or_none(event.get("xid")),
        _read_name(event.get("recovery_action")),
    )


def _read_name(value: object) -> str:
    return to_printable(str(value or ""), 100)


def _classify_exit(
    exit_event: Event, report: Mapping[str, Any], node: str, memory_pressure: MemoryPressure
) -> Failure:
    rank = _count_or_none(exit_event.get("rank"))
    if exit_event.get("stuck"):
        return Failure(STUCK, node, rank)
    if report:
        return _classify_exception(report, exit_event, node, memory_pressure)
    end, text = _read_worker_end(exit_event), str(exit_event.get("message") or "").strip()
    message = text.partition("\n")[0]
    if (end.signal == "SIGKILL" or end.exit_code == _SIGKILL_EXIT_CODE) and memory_pressure.is_short:
        return Failure(OOM, node, rank, replace(end, memory=memory_pressure), message=message)
    typed = _EXCEPTION_PATTERN.fullmatch(text) if not end.signal else None
    if typed is None:
        return Failure(SIGNAL if end.signal else EXIT, node, rank, end, message=message)
    name, text = typed[1].rpartition(".")[2], typed[2]
    failure = Failure(EXCEPTION, node, rank, end, name, summarize_error_text(text))
    return _refine_kind(replace(failure, gpu_error=find_gpu_error(name, text)), memory_pressure)


def _classify_exception(
    report: Mapping[str, Any], exit_event: Mapping[str, Any], node: str, memory_pressure: MemoryPressure
) -> Failure:
    rank, exception_type = _count_or_none(report.get("rank")), str(report.get("type") or "")
    text = "\n".join(str(report.get(name) or "") for name in ("message", "detail"))
    message, gpu_error = summarize_error_text(text), find_gpu_error(exception_type, text)
    if gpu_error is None and report.get("cause"):
        cause = str(report["cause"])
        gpu_error = find_gpu_error(str(report.get("cause_type") or ""), cause)
        message = f"{message[:200]} (from: {summarize_error_text(cause)})" if gpu_error else message
    failure = Failure(
        EXCEPTION,
        node,
        _count_or_none(exit_event.get("rank")) if rank is None else rank,
        _read_worker_end(exit_event),
        exception_type,
        message,
        str(report.get("frame") or ""),
        _count_or_none(report.get("step")),
        bool(report.get("deterministic")),
        gpu_error=gpu_error,
        is_worth_requeue=report.get("worth_requeue") is True,
    )
    if report.get("is_proving") is True and gpu_error is None and not failure.is_secondary:
        return replace(failure, kind=NOT_PROVED)  # in the steps that are computed again
    return _refine_kind(failure, memory_pressure)


def _refine_kind(failure: Failure, memory_pressure: MemoryPressure) -> Failure:
    """Replace the kind of an exception by the kind that its text proves."""
    if failure.type == "DivergenceError":
        return replace(failure, kind=DIVERGENCE)
    if failure.type == "NotProvedError":
        return replace(failure, kind=NOT_PROVED)
    if failure.type == "HardwareError":
        return replace(failure, kind=HARDWARE)
    is_exception = failure.kind == EXCEPTION
    if failure.type in _OWN_DISK_ERRORS or (is_exception and _DISK_ERROR_PATTERN.match(failure.message)):
        return replace(failure, kind=DISK)
    if is_exception and memory_pressure.oom_kills and _CHILD_KILLED_PATTERN.search(failure.message):
        # The kernel killed a child process of the worker, for instance of a DataLoader.
        cause = failure.cause if isinstance(failure.cause, WorkerEnd) else WorkerEnd()
        return replace(failure, kind=OOM, cause=replace(cause, memory=memory_pressure))
    return failure


def _read_worker_end(exit_event: Mapping[str, Any]) -> WorkerEnd:
    signal = to_printable(str(exit_event.get("signal") or ""), 32)
    return WorkerEnd(None if signal else _count_or_none(exit_event.get("exit_code")), signal)


def _unresolved_hangs(events: Iterable[Event]) -> list[Event]:
    """Return the hangs that did not end by themselves."""
    hangs: list[Event] = []
    for event in events:
        if event["event"] == "hang":
            hangs.append(event)
        elif event["event"] == "hang-ended":
            hangs.clear()
    return hangs


def _was_killed_for(hang: Event, end: Event) -> bool:
    killed = end["event"] == "worker-exit" and end.get("signal") == "SIGKILL" and _failed_by_itself(end)
    return killed and not end.get("stuck") and _count_or_none(end.get("rank")) in _hang_ranks(hang)


def _hang_failure(suspect: Mapping[str, Any], step: int | None, node: str) -> Failure:
    stall = Stall(Activity.UNKNOWN)
    with contextlib.suppress(ValueError):
        stall = from_json(Stall, suspect.get("reason"))
    return Failure(HANG, node, _count_or_none(suspect.get("rank")), stall, step=step)


def _parse_suspects(event: Event) -> list[Mapping[str, Any]]:
    suspects = event.get("suspects")
    return [item for item in suspects if isinstance(item, dict)] if isinstance(suspects, list) else []


def _hang_ranks(event: Event) -> list[int]:
    victims = event.get("victims")
    ranks = [suspect.get("rank") for suspect in _parse_suspects(event)]
    ranks += victims if isinstance(victims, list) else []
    return [rank for rank in ranks if isinstance(rank, int)]


def _is_same_worker(report: Event, end: Event) -> bool:
    """Whether both events are of one worker; it may have written the first before it knew its rank."""
    if report.get("rank") is None:
        return "pid" in report and bool(report["pid"] == end.get("worker_pid"))
    return bool(report["rank"] == end.get("rank"))


def _failed_by_itself(end: Event) -> bool:
    return not end.get("stopped") and (end.get("exit_code") != 0 or bool(end.get("signal")))


def _count_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
