"""Does one fault to simulated nodes: from a `Fault` to the methods of `lab.Cluster`.

`aim` says whom it hits at this moment; `strike` does it, and gives what ends it where it ends by itself;
`entry` says what is armed (`arming.py`) for those that a process does to itself. Decides nothing about when:
see `course.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from elastic_resume.errors import UsageError
from elastic_resume.faults import links
from elastic_resume.faults.fault import Fault, duration
from elastic_resume.faults.kinds import IN_WORKER, NODES, WORKER
from elastic_resume.faults.lab import Cluster

Undo = Callable[[], object]
GARBAGE_BYTES = 4096
GARBAGE_S = 2.0
_CALL = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), {s}).sendall({junk})"
_SILENCES = ("cut", "cut-out", "cut-in", "partition")  # each ends for itself
_SETTINGS = ("packet-loss", "slow-link", "slow-disk")  # a node has one at a time


class NotNowError(Exception):
    """Whom it is to hit is not there at this moment: dead, or just starting."""


@dataclass(frozen=True)
class Target:
    """Whom a fault hits: a node, or one worker of it. ``node`` None: several nodes, by groups."""

    node: int | None
    local_rank: int | None = None
    rank: int | None = None
    pid: int | None = None  # as its node knows it, of a worker that stands at a point

    def __str__(self) -> str:
        if self.node is None:
            return "the network"
        return f"n{self.node}" if self.rank is None else f"rank {self.rank} on n{self.node}"

    @property
    def index(self) -> int:
        """The node, of what hits one."""
        if self.node is None:
            raise ValueError("a partition hits no single node")
        return self.node


def aim(cluster: Cluster, fault: Fault) -> tuple[Target, ...]:
    """Whom ``fault`` hits now.

    Raises:
        NotNowError: nobody, at this moment.

    """
    if fault.kind.hits == NODES:
        return (Target(None),)
    workers = _workers(cluster)
    if fault.kind.hits == WORKER:
        found = [one for one in workers.values() if _is_meant(fault, one)]
        if not found:
            raise NotNowError(f"there is no {fault.whom}")
        return tuple(found)
    if fault.role == "all":
        nodes = [index for index, node in enumerate(cluster.nodes) if node.alive]
    elif fault.role == "leader":
        nodes = [_leader(cluster)]
    elif fault.role == "rank-0":
        nodes = [workers[0].index] if 0 in workers else []
    else:
        nodes = [] if fault.node is None else [fault.node]
    if not nodes or not all(cluster.nodes[index].alive for index in nodes):
        raise NotNowError(f"{fault.whom} is down")
    return tuple(Target(index) for index in nodes)


def aim_at(cluster: Cluster, fault: Fault, who: Mapping[str, object]) -> tuple[Target, ...]:
    """Whom ``fault`` hits when ``who``, as `Arming.fired` has it, stands at the point of its phase.

    Raises:
        NotNowError: it is not whom it names who stands there.

    """
    found = [index for index, node in enumerate(cluster.nodes) if node.name == who.get("node")]
    if fault.kind.hits == WORKER and fault.point in IN_WORKER and fault.role != "all" and found:
        local, rank, pid = (int(str(who[name] or 0)) for name in ("local", "rank", "pid"))
        return (Target(found[0], local, rank, pid),)
    targets = aim(cluster, fault)
    if fault.kind.hits != NODES and fault.role != "all" and targets[0].node not in found:
        raise NotNowError(f"{fault.whom} was not {fault.phase}")
    return targets


def shared(fault: Fault, target: Target) -> tuple[object, ...]:
    """What one undo ends for all: of faults that have this in common, the last to be over calls it."""
    return () if fault.what in _SILENCES else (fault.what, target)


def renew(cluster: Cluster, fault: Fault, target: Target) -> None:
    """Have what still lasts hold again, when the end of another or a start of its node has undone it."""
    if fault.what in _SETTINGS:
        strike(cluster, fault, target)


def strike(cluster: Cluster, fault: Fault, target: Target) -> Undo | None:
    """Do it; give what ends it, for those that have a time.

    Raises:
        NotNowError: whom it is to hit has just gone, or has not what it hits.

    """
    return _ACTS[fault.what](cluster, fault, target)


def entry(fault: Fault) -> str:
    """What is armed for a fault that a process does to itself; empty for all others."""
    if fault.what == "corrupt-message" and fault.sender == "peer":
        return "wire.line=flip"
    if not fault.kind.inside:
        return ""
    actions = {
        "raise": f"raise:{fault.error}",
        "exit": f"exit:{fault.code}",
        "slow-rank": f"delay:{fault.delay_s}",
        "skip-collective": "do:skip-collective",
        "out-of-memory": f"out-of-memory:{fault.limit_bytes}",
        "hold-gil": "hold-gil" if fault.for_s is None else f"hold-gil:{fault.for_s}",
    }
    return f"{fault.point or 'step'}={actions[fault.what]}"


def told(fault: Fault) -> str:
    """What is set of a fault, in words: "for 6s, 5 %"."""
    words: Mapping[str, Callable[[], str]] = {
        "for_s": lambda: f"for {duration(fault.for_s or 0)}",
        "signal": lambda: str(fault.signal),
        "error": lambda: str(fault.error),
        "code": lambda: f"code {fault.code}",
        "delay_s": lambda: (
            f"{duration(fault.delay_s or 0)} a {'request' if fault.what == 'slow-disk' else 'step'}"
        ),
        "percent": lambda: f"{fault.percent:g} %",
        "bytes_per_s": lambda: f"{(fault.bytes_per_s or 0) / 1e6:g} MB/s",
        "sender": lambda: f"from a {fault.sender}",
    }
    return ", ".join(say() for name, say in words.items() if getattr(fault, name) is not None)


# ---- whom ----------------------------------------------------------------------------------------------


def _workers(cluster: Cluster) -> dict[int, Target]:
    """The workers of the newest generation, by rank."""
    lines = list(cluster.lines())
    newest = max((line.generation for _, line in lines), default=0)
    return {
        line.worker.rank: Target(index, line.local_rank, line.worker.rank)
        for index, line in lines
        if line.generation == newest and cluster.nodes[index].alive
    }


def _is_meant(fault: Fault, worker: Target) -> bool:
    if fault.role == "all":
        return True
    if fault.node is not None:  # of a node, its lead
        return worker.node == fault.node and worker.local_rank == 0
    return worker.rank == (0 if fault.role == "rank-0" else fault.rank)


def _leader(cluster: Cluster) -> int:
    """The node whose agent said last that it leads."""
    names = {node.name: index for index, node in enumerate(cluster.nodes)}
    for event in reversed(cluster.events("rendezvous")):
        if event.get("what") == "leading" and event.get("node") in names:
            return names[event["node"]]
    raise NotNowError("nobody leads yet")


# ---- what ----------------------------------------------------------------------------------------------


def _signal_worker(cluster: Cluster, target: Target, name: str) -> None:
    try:
        if target.pid is None:
            cluster.kill_worker(target.index, target.local_rank or 0, signal.Signals[name])
        else:
            cluster.signal_process(target.index, target.pid, signal.Signals[name])
    except (UsageError, OSError, psutil.NoSuchProcess) as error:  # it is dying of something else
        raise NotNowError(str(error)) from error


def _kill_worker(cluster: Cluster, fault: Fault, target: Target) -> None:
    _signal_worker(cluster, target, fault.signal or "SIGKILL")


def _stop_worker(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del fault
    _signal_worker(cluster, target, "SIGSTOP")

    def go_on() -> None:
        with contextlib.suppress(NotNowError):  # it has been killed for it
            _signal_worker(cluster, target, "SIGCONT")

    return go_on


def _stop_agent(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del fault
    cluster.kill_agent(target.index, signal.SIGSTOP)
    return lambda: cluster.kill_agent(target.index, signal.SIGCONT)


def _wipe(cluster: Cluster, fault: Fault, target: Target) -> None:
    del fault
    cluster.kill_node(target.index)
    cluster.wipe(target.index)


def _cut(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    others = [other for other in range(len(cluster.nodes)) if other != target.index]
    sent = {(target.index, other) for other in others} if fault.what != "cut-in" else set()
    received = {(other, target.index) for other in others} if fault.what != "cut-out" else set()
    return cluster.hosts.silence(sent | received)


def _part(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del target
    return cluster.hosts.silence(links.Silence(links.sides(fault.groups, len(cluster.nodes))).pairs())


def _lose_packets(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    cluster.lose_packets(target.index, fault.percent or 0)
    return lambda: cluster.lose_packets(target.index, 0)


def _limit_rate(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    cluster.limit_rate(target.index, fault.bytes_per_s or 0)
    return lambda: cluster.limit_rate(target.index, 0)


def _fill_disk(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del fault
    cluster.fill_disk(target.index)
    return lambda: cluster.free_disk(target.index)


def _break_disk(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    del fault
    cluster.break_disk(target.index)
    return lambda: cluster.mend_disk(target.index)


def _slow_disk(cluster: Cluster, fault: Fault, target: Target) -> Undo:
    cluster.slow_disk(target.index, fault.delay_s or 0)
    return lambda: cluster.slow_disk(target.index, 0)


def _damage(cluster: Cluster, fault: Fault, target: Target) -> None:
    fraction = fault.fraction or 0.0
    try:
        if fault.what == "torn-write":
            cluster.truncate_newest(target.index, fraction)
        else:
            cluster.corrupt(target.index, fraction)
    except (UsageError, OSError) as error:  # there is none yet, or it was pruned just now
        raise NotNowError(str(error)) from error


def _send_garbage(cluster: Cluster, fault: Fault, target: Target) -> None:
    """Call the node's agent as a stranger does; where nodes have a network each, from another one."""
    del fault
    host, _, port = cluster.endpoints[target.index].rpartition(":")
    junk = os.urandom(GARBAGE_BYTES) + b"\n"
    others = [index for index, node in enumerate(cluster.nodes) if node.alive and index != target.index]
    try:
        networks = cluster.hosts
    except UsageError:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), GARBAGE_S) as call:
            call.sendall(junk)
        return
    code = _CALL.format(s=GARBAGE_S, junk=junk)
    command = [sys.executable, "-I", "-S", "-c", code, host, port]
    if others:
        subprocess.run(
            networks.command(others[0], command), capture_output=True, check=False, timeout=4 * GARBAGE_S
        )


_ACTS: Mapping[str, Callable[[Cluster, Fault, Target], Undo | None]] = {
    "kill-worker": _kill_worker,
    "kill-agent": lambda cluster, _, target: cluster.kill_agent(target.index),
    "kill-node": lambda cluster, _, target: cluster.kill_node(target.index),
    "poweroff": lambda cluster, _, target: cluster.poweroff(target.index),
    "stop-worker": _stop_worker,
    "stop-agent": _stop_agent,
    "preemption": lambda cluster, _, target: cluster.give_notice(target.index),
    "cut": _cut,
    "cut-out": _cut,
    "cut-in": _cut,
    "partition": _part,
    "packet-loss": _lose_packets,
    "slow-link": _limit_rate,
    "disk-full": _fill_disk,
    "disk-error": _break_disk,
    "slow-disk": _slow_disk,
    "torn-write": _damage,
    "bit-flip": _damage,
    "wipe-disk": _wipe,
    "corrupt-message": _send_garbage,
}
