"""Classify failures by kind, and separate root causes from secondary failures.

`classify_round` turns the events that one node wrote in a generation into failures. Each node reports one to
the leader. The leader adds the nodes that it lost, and sends all of them to every node in the order of
arrival. `separate_root_causes` decides which of them are root causes.

When a worker dies, its peers' connections break and they fail too, often before the leader has seen the first
death. So an error that speaks of a lost connection is secondary if any other failure is known, whichever
arrived first. If there is no other failure, the first of them is the root cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_resume.events import Event

EXCEPTION, EXIT, SIGNAL, OOM = "exception", "exit", "signal", "oom"
HANG, DIVERGENCE, DISK, STUCK = "hang", "divergence", "disk", "stuck"
NODE_LOST, PREEMPTED, NETWORK = "node-lost", "preempted", "network"
FAILURE_KINDS = (EXCEPTION, EXIT, SIGNAL, OOM, HANG, DIVERGENCE, DISK, STUCK, NODE_LOST, PREEMPTED, NETWORK)
NODE_FAILURE_KINDS = frozenset({NODE_LOST, PREEMPTED, NETWORK})
"""Kinds that say nothing about a worker: the node came or went, or two nodes cannot reach each other."""

MAX_TEXT_CHARS = 500
"""Characters of each text: a failure travels to every node."""
MAX_NAMED = 4
_SECONDARY_PATTERN = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|remote worker|remote process|"
    r"ncclremoteerror|gloo|nccl|dist(backend|network|store)error|sendbytes|recvvalue|socket ?timeout|"
    r"store->get|watchdog|on node \S+ cannot continue",
    re.IGNORECASE,
)
_OWN_DISK_ERRORS = frozenset({"MachineError", "NodeLockedError", "NodeFileError"})
# Python's OSError begins its text so for ENOSPC, EDQUOT, EROFS and EIO.
_DISK_ERROR_PATTERN = re.compile(r"\[Errno (28|122|30|5)\]")
# torch's @record and Python itself begin the text of an exception so.
_EXCEPTION_PATTERN = re.compile(
    r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)): ?(.*)", re.DOTALL
)
_SIGKILL_EXIT_CODE = 137  # a shell reports a child that SIGKILL ended as 128 + 9
_CHILD_KILLED_PATTERN = re.compile(r"killed by signal: Killed|SIGKILL")
_NUMBER_PATTERN = re.compile(r"0x[0-9a-f]+|\d+")
_WAITED_FOR_PEER = "timed out waiting for other ranks"  # all ranks of a node hung because of another node


@dataclass(frozen=True, slots=True)
class Failure:
    """One observed failure. It is sent to other nodes, so its fields are plain and its texts are bounded."""

    kind: str
    node: str
    rank: int | None
    text: str
    """What happened, as a clause that follows its subject: "was killed by SIGKILL"."""
    type: str = ""
    """The exception's class."""
    message: str = ""
    """The first line of its message."""
    frame: str = ""
    """Where in the user's code it was raised."""
    step: int | None = None
    """The last step that the worker had finished; None before training began."""
    is_deterministic: bool = False
    """The worker reported that a restart would meet the same error."""
    nodes: int = 1
    """The number of nodes with a like failure."""

    @property
    def is_secondary(self) -> bool:
        """Whether it looks like the effect of a lost peer on a living worker."""
        if self.kind == SIGNAL:
            return "SIGABRT" in self.text  # NCCL's watchdog aborts the process when a peer is gone
        if self.kind == HANG:
            return self.text == _WAITED_FOR_PEER
        return self.kind in {EXCEPTION, EXIT} and looks_secondary(f"{self.type} {self.message}")

    @property
    def signature(self) -> tuple[str, str, str, str]:
        """Return a key that ignores numbers: ranks, addresses, process ids."""
        return (self.kind, self.type, self.frame, _NUMBER_PATTERN.sub("#", self.message or self.text))


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """The memory of this node during a generation, as `agent.failure_evidence` measured it."""

    oom_kills: int = 0
    """The increase of the kernel's count of processes killed for memory."""
    description: str = ""
    """How short memory was; empty if it was not short."""


@dataclass(frozen=True, slots=True)
class FailureVerdict:
    """The failures of a generation, separated into root causes and secondary failures."""

    root_causes: tuple[Failure, ...] = ()
    secondary_failures: tuple[Failure, ...] = ()

    @property
    def root_cause(self) -> Failure | None:
        """Return the first root cause, or None."""
        return self.root_causes[0] if self.root_causes else None


def looks_secondary(text: str) -> bool:
    """Whether an error's text looks like the effect of a lost peer."""
    return _SECONDARY_PATTERN.search(text) is not None


def separate_root_causes(failures: Iterable[Failure]) -> FailureVerdict:
    """Separate root causes from secondary failures. ``failures`` are in order of arrival.

    Deterministic failures come before all others, then nodes that cannot reach each other.
    """
    listed = sorted(failures, key=lambda failure: (not failure.is_deterministic, failure.kind != NETWORK))
    causes = [failure for failure in listed if failure.is_deterministic or not failure.is_secondary]
    if not causes:
        causes = listed[:1]
    return FailureVerdict(tuple(causes), tuple(failure for failure in listed if failure not in causes))


def make_node_failure(node: str, reason: str, *, announced: bool = False) -> Failure:
    """Make the failure of a lost node; ``announced``: the node had been asked to leave."""
    return truncate_failure(Failure(PREEMPTED if announced else NODE_LOST, node, None, reason))


def make_network_failure(node: str, peers: Sequence[str]) -> Failure:
    """Make the failure of a node that cannot reach some of the others."""
    more = f" and {len(peers) - MAX_NAMED} more" if len(peers) > MAX_NAMED else ""
    return Failure(NETWORK, node, None, to_printable(f"cannot reach {', '.join(peers[:MAX_NAMED])}{more}"))


def truncate_failure(failure: Failure) -> Failure:
    """Limit the length of its texts and remove control characters."""
    return replace(
        failure,
        kind=to_printable(failure.kind, 32),
        text=to_printable(failure.text),
        type=to_printable(failure.type, 100),
        message=to_printable(failure.message),
        frame=to_printable(failure.frame),
    )


def to_printable(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return one line of printable text with at most ``limit`` characters."""
    text = "".join(char if char.isprintable() else " " for char in text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"


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


# ---- in words ------------------------------------------------------------------------------------------


def describe_failure(failure: Failure | None, *, with_node: bool = False) -> str:
    """Describe what happened to which rank, without a full stop; with ``with_node`` also on which node."""
    if failure is None:
        return "a worker exited without reporting an error"
    if failure.kind in NODE_FAILURE_KINDS:
        return f"node {failure.node} {failure.text}"
    subject = "a worker" if failure.rank is None else f"rank {failure.rank}"
    if with_node:
        subject += f" on node {failure.node}"
    if failure.nodes > 1:
        subject += f" (and alike on {failure.nodes - 1} more)"
    error = ": ".join(part for part in (failure.type, failure.message.rstrip(".")) if part)
    where = f" ({failure.frame})" if failure.frame else ""
    return f"{subject} {failure.text}" + (f": {error}{where}" if error else where)


def explain_verdict(verdict: FailureVerdict) -> list[str]:
    """Describe the root causes and the secondary failures in a few lines."""
    if verdict.root_cause is None:
        return []
    lines = [f"first: {describe_failure(verdict.root_cause, with_node=True)}."]
    if verdict.root_causes[1:]:
        lines.append(f"also: {_list_failures(verdict.root_causes[1:])}.")
    if verdict.secondary_failures:
        count = sum(failure.nodes for failure in verdict.secondary_failures)
        lines.append(
            f"as a consequence, on {count} node{'s' * (count > 1)}: "
            f"{_list_failures(verdict.secondary_failures)}."
        )
    return lines


def _list_failures(failures: Sequence[Failure]) -> str:
    shown = [describe_failure(failure, with_node=True) for failure in failures[:MAX_NAMED]]
    more = len(failures) - MAX_NAMED
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


# ---- from the events of one node -----------------------------------------------------------------------


def classify_round(
    events: Iterable[Event], node: str, memory_pressure: MemoryPressure | None = None
) -> tuple[Failure, ...]:
    """Return the failures of one node's workers in a generation; see `classify_with_times`."""
    return tuple(failure for _, failure in classify_with_times(events, node, memory_pressure))


def classify_with_times(
    events: Iterable[Event], node: str, memory_pressure: MemoryPressure | None = None
) -> tuple[tuple[float, Failure], ...]:
    """Return the failures of one node's workers with their times, root causes first, each group by time.

    A worker that was told to stop did not fail, nor did one that then lost a peer that was stopped with it.
    A worker that was killed for a hang is covered by the hang.
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
            found.append((hang["t"], Failure(HANG, node, _hang_ranks(hang)[0], _WAITED_FOR_PEER, step=step)))
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
    found.sort(key=lambda pair: (not pair[1].is_deterministic, pair[1].is_secondary, pair[0]))
    return tuple((t, truncate_failure(failure)) for t, failure in found)


def _classify_exit(
    exit_event: Event, report: Mapping[str, Any], node: str, memory_pressure: MemoryPressure
) -> Failure:
    rank = _count_or_none(exit_event.get("rank"))
    if exit_event.get("stuck"):
        text = "does not die of SIGKILL: it sleeps in the kernel (state D), on a device or a file system"
        return Failure(STUCK, node, rank, text)
    if report:
        return _classify_exception(report, exit_event, node, memory_pressure)
    code, signal = _count_or_none(exit_event.get("exit_code")), exit_event.get("signal")
    kind, name, message = (SIGNAL if signal else EXIT), "", _first_line(exit_event.get("message"))
    text = f"was killed by {signal}" if signal else _describe_exit_code(code)
    if signal == "SIGKILL" or code == _SIGKILL_EXIT_CODE:
        reason = _describe_oom(memory_pressure)
        if reason:
            return Failure(OOM, node, rank, f"{text}, out of memory: {reason}", message=message)
    typed = _EXCEPTION_PATTERN.fullmatch(message) if not signal else None
    if typed:
        kind, name, message = EXCEPTION, typed[1].rpartition(".")[2], typed[2]
    return _refine_kind(Failure(kind, node, rank, text, name, message), memory_pressure)


def _classify_exception(
    report: Mapping[str, Any], exit_event: Mapping[str, Any], node: str, memory_pressure: MemoryPressure
) -> Failure:
    rank = _count_or_none(report.get("rank"))
    signal, code = exit_event.get("signal"), _count_or_none(exit_event.get("exit_code"))
    failure = Failure(
        EXCEPTION,
        node,
        _count_or_none(exit_event.get("rank")) if rank is None else rank,
        f"was killed by {signal}" if signal else _describe_exit_code(code),
        str(report.get("type") or ""),
        _first_line(report.get("message")),
        str(report.get("frame") or ""),
        _count_or_none(report.get("step")),
        bool(report.get("deterministic")),
    )
    return _refine_kind(failure, memory_pressure)


def _refine_kind(failure: Failure, memory_pressure: MemoryPressure) -> Failure:
    """Replace the kind of an exception by the kind that its text proves."""
    if failure.type == "DivergenceError":
        return replace(failure, kind=DIVERGENCE)
    is_exception = failure.kind == EXCEPTION
    if failure.type in _OWN_DISK_ERRORS or (is_exception and _DISK_ERROR_PATTERN.match(failure.message)):
        return replace(failure, kind=DISK)
    if is_exception and memory_pressure.oom_kills and _CHILD_KILLED_PATTERN.search(failure.message):
        # The kernel killed a child process of the worker, for instance of a DataLoader.
        text = f"{failure.text}, out of memory: {_describe_oom(memory_pressure)}"
        return replace(failure, kind=OOM, text=text)
    return failure


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
    reason = str(suspect.get("reason") or "made no progress").removeprefix("it ")
    return Failure(HANG, node, _count_or_none(suspect.get("rank")), f"hung: it {reason}", step=step)


def _describe_oom(memory_pressure: MemoryPressure) -> str:
    kills, description = memory_pressure.oom_kills, memory_pressure.description
    if not kills:
        return description
    processes = "a process" if kills == 1 else f"{kills} processes"
    text = f"the kernel killed {processes} of this node's control group"
    return f"{text}; {description}" if description else text


def _describe_exit_code(code: int | None) -> str:
    return "failed" if code is None else f"ended with exit code {code}"


def _first_line(text: object) -> str:
    return str(text or "").strip().partition("\n")[0]


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
