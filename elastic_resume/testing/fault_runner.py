"""The course of a job under a plan: which fault is due, what ends, who is started again.

`Course.look` is called often, by the thread that owns the cluster, and never waits for anything longer than
a death. A fault of a step is due when any rank has finished it, one of a time so long after the first step,
one of a phase when a process stands at its point; and it waits for whom it is to hit. What died of a fault,
or left, is started again after its time, as a cluster would; so is an agent that ended by itself.

Promise: each fault is told (`faults.jsonl`, `say`) in the moment it is done, its fate is in `fates`, and
`close` ends all that lasts. Does not know why the job does what it does after a fault: its events tell that.

Does one fault to simulated nodes: from a `Fault` to the methods of `lab.Cluster`.

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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil

from elastic_resume import constants
from elastic_resume.errors import ElasticResumeError, UsageError
from elastic_resume.events import EventLog
from elastic_resume.snapshot.progress_page import Line
from elastic_resume.testing import virtual_network
from elastic_resume.testing.cluster import Cluster
from elastic_resume.testing.faults import IN_WORKER, NODES, WORKER, Fault, duration
from elastic_resume.testing.triggers import Arming

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


def shared_file(fault: Fault, target: Target) -> tuple[object, ...]:
    """What one undo ends for all: of faults that have this in common, the last to be over calls it."""
    return () if fault.what in _SILENCES else (fault.what, target)


def renew_links(cluster: Cluster, fault: Fault, target: Target) -> None:
    """Have what still lasts hold again, when the end of another or a start of its node has undone it."""
    if fault.what in _SETTINGS:
        strike(cluster, fault, target)


def strike(cluster: Cluster, fault: Fault, target: Target) -> Undo | None:
    """Do it; give what ends it, for those that have a time.

    Raises:
        NotNowError: whom it is to hit has just gone, or has not what it hits.

    """
    return _ACTS[fault.what](cluster, fault, target)


def fault_entry(fault: Fault) -> str:
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
    return cluster.hosts.silence(
        virtual_network.Silence(virtual_network.sides(fault.groups, len(cluster.nodes))).pairs()
    )


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


AGAIN_S = 2.0  # as long as a scheduler takes, at the least, to start a node again that ended by itself
ALL_S = 5.0  # within which all ranks have come to a point that one has passed
MAX_STARTS = 1000  # of one node: a job that ends at each start would be started for ever
FAILURES = (ElasticResumeError, OSError, subprocess.SubprocessError, psutil.Error)
WAITING, ARMED, DONE, FAILED = "waiting", "armed", "done", "failed"


@dataclass
class Fate:
    """What became of one fault. ``t``: when it was done first, in seconds since the epoch.

    ``whom``, ``nodes`` and ``rank`` are those of that time too; ``again``: when and whom it hit later.
    """

    number: int
    fault: Fault
    is_drawn: bool = False  # and not written in the plan
    state: str = WAITING
    times: int = 0
    t: float | None = None
    whom: str = ""
    nodes: tuple[str, ...] = ()  # that it hit, by name; none of several
    rank: int | None = None  # that it hit, whomever it names
    why: str = ""  # it has not come, or could not be done
    generation: int = 0  # that it hit last
    marks: list[str] = field(default_factory=list)  # of what is armed for it
    again: list[tuple[float, tuple[str, ...], int | None]] = field(default_factory=list)


@dataclass(frozen=True)
class _Later:
    """What is to be done at a time."""

    at: float
    what: str
    act: Callable[[], object]
    shared: tuple[object, ...] = ()  # until the last of those that have this in common is over
    node: int | None = None
    renew: Callable[[], object] = lambda: None


class Course:
    """One job, and the faults that are still to come."""

    def __init__(
        self,
        cluster: Cluster,
        schedule: Sequence[Fault],
        arming: Arming,
        say: Callable[[str], None] = lambda _: None,
        written: int | None = None,
    ) -> None:
        """``arming``: of the nodes' environment, for faults within processes; ``written``: so many are."""
        last = len(schedule) if written is None else written
        self.fates = [Fate(number, fault, number > last) for number, fault in enumerate(schedule, 1)]
        self._cluster = cluster
        self._arming = arming
        self._say = say
        self._log = EventLog(cluster.run_dir / constants.FAULTS_FILE)
        self._first_step: float | None = None
        self._generation = 0
        self._later: list[_Later] = []
        self._back: dict[int, float] = {}  # node → seconds that it stays down, once it is
        self._down: dict[int, float] = {}  # node → since when
        self._standing: list[str] = []  # marks of what hits every process that comes by
        self._starts = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the job's first step; 0 before it."""
        return 0.0 if self._first_step is None else time.monotonic() - self._first_step

    @property
    def pending(self) -> list[Fate]:
        """Faults that are still to come."""
        return [fate for fate in self.fates if fate.state in {WAITING, ARMED}]

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way: no fault lasts, and nobody is about to be started again."""
        return not self._later and not self._back

    @property
    def is_over(self) -> bool:
        """Whether no agent runs, and none will."""
        return not any(node.alive for node in self._cluster.nodes) and not self._returning()

    def look(self) -> None:
        """Do what is due."""
        lines = [line for _, line in self._cluster.lines()]
        self._generation = max((line.generation for line in lines), default=0)
        if self._first_step is None and any(line.step > 0 for line in lines):
            self._first_step = time.monotonic()
        for later in [one for one in self._later if time.monotonic() >= one.at]:
            self._later.remove(later)
            still = [one for one in self._later if later.shared and one.shared == later.shared]
            if not still:
                self._say(later.what)
            self._try(later.what, still[-1].renew if still else later.act)
        self._tend()
        for fate in self.fates:
            again = fate.fault.repeat and not fault_entry(fate.fault)  # those that are armed stay so
            if fate.state == DONE and again and self._generation > fate.generation:
                fate.state = WAITING
            if fate.state == WAITING and self._is_due(fate.fault, lines):
                self._begin(fate)
            if fate.state == ARMED:
                self._look_at_armed(fate)

    def finish(self, why: str) -> None:
        """Let no further fault come; who is down because of one is still started again."""
        while self._standing:
            self._arming.disarm(self._standing.pop())
        for fate in self.pending:
            self._disarm(fate)
            # One that repeats has come; it is the next time that does not.
            fate.state, fate.why = (DONE, "") if fate.times else (FAILED, fate.why or why)

    def dismiss(self) -> None:
        """Start nobody again from now on."""
        self._starts = MAX_STARTS

    def end(self) -> None:
        """End what lasts; who is down is still started again."""
        for later in self._later:
            self._try(later.what, later.act)
        self._later = []

    def close(self) -> None:
        """End all of it."""
        self.finish("the job was over")
        self.end()
        self._log.close()

    # ---- when ----------------------------------------------------------------------------------------

    def _is_due(self, fault: Fault, lines: Sequence[Line]) -> bool:
        if fault.step is not None:
            # A worker looks at its steps itself, and hits that very one.
            return _at_step(fault) or any(line.step >= fault.step for line in lines)
        if fault.at_s is not None:
            return self._first_step is not None and self.elapsed_s >= fault.at_s
        return True

    def _begin(self, fate: Fate) -> None:
        """Do it, or let the process that it hits do it."""
        fault = fate.fault
        entry = fault_entry(fault)
        fate.generation = self._generation
        if entry:
            for conditions in _conditions(fault, len(self._cluster.nodes), self._cluster.workers_per_node):
                step = fault.step if _at_step(fault) else None
                mark = self._arming.arm(entry, step=step, for_=_lasting(fault), **conditions)
                fate.marks.append(mark)
                if fault.repeat:
                    self._standing.append(self._arming.arm(entry, step=step, once="", **conditions))
            fate.state = ARMED
        elif fault.phase:
            places = _places(fault, len(self._cluster.nodes))
            fate.marks += [self._arming.arm(f"{fault.point}=wait", **place) for place in places]
            fate.state = ARMED
        else:
            self._strike(fate)

    def _look_at_armed(self, fate: Fate) -> None:
        for mark in list(fate.marks):
            if fault_entry(fate.fault):
                who = self._arming.fired(mark)
                if who is not None:
                    self._disarm_later(fate)
                    rank = int(who["rank"]) if str(who.get("rank", "")).isdecimal() else None
                    node = str(who.get("node", ""))
                    whom = f"rank {rank} on {node}" if rank is not None else node
                    self._done(fate, whom, (node,), rank, float(who.get("t", time.time())))
                    return
            elif self._arming.waits(mark):
                self._strike(fate, self._arming.fired(mark))
                for one in fate.marks:  # who stands at another by now, too
                    self._arming.release(one)
                self._disarm(fate)
                if fate.state == ARMED:  # not now: nobody is held for it, and the next time may be
                    fate.state = WAITING
                return

    def _disarm_later(self, fate: Fate) -> None:
        """What has begun goes on for its time; and where all are meant, the others are hit as well."""
        lasts_s = _lasting(fate.fault) or (ALL_S if fate.fault.role == "all" else 0.0)
        if lasts_s:
            marks, fate.marks = fate.marks, []
            what = f"fault {fate.number} is over: {fate.fault.what}"
            acts = (partial(self._arming.disarm, mark) for mark in marks)
            self._later += [_Later(time.monotonic() + lasts_s, what, act) for act in acts]
        self._disarm(fate)

    def _disarm(self, fate: Fate) -> None:
        for mark in fate.marks:
            self._arming.disarm(mark)
        fate.marks = []

    # ---- what ----------------------------------------------------------------------------------------

    def _strike(self, fate: Fate, who: Mapping[str, object] | None = None) -> None:
        """Hit whom it names, as far as they are there; ``who`` waits for it, where it is of a phase."""
        fault, now = fate.fault, time.time()
        try:
            targets = aim_at(self._cluster, fault, who) if who else aim(self._cluster, fault)
        except (NotNowError, *FAILURES) as error:
            fate.why = str(error)
            return
        hit = [target for target in targets if self._hit(fate, target)]
        if hit:
            indices = [one.node for one in hit if one.node is not None]
            nodes = [
                node.name for index, node in enumerate(self._cluster.nodes) if index in indices or not indices
            ]
            self._done(fate, ", ".join(map(str, hit)), tuple(nodes), hit[0].rank, now)

    def _hit(self, fate: Fate, target: Target) -> bool:
        """Do it to one of those whom it hits; False: not now, or it cannot be done."""
        fault = fate.fault
        try:
            undo = strike(self._cluster, fault, target)
        except NotNowError as error:
            fate.why = str(error)
            return False
        except FAILURES as error:
            fate.state, fate.why = FAILED, str(error)
            self._say(f"fault {fate.number}: {fault.what} could not be done: {error}")
            return False
        if fault.back_after_s is not None:
            self._back[target.index] = fault.back_after_s
        if fault.for_s is not None and undo is not None:
            what = f"fault {fate.number} is over: {fault.what} {target}"
            shared = shared_file(fault, target)
            renew = partial(renew_links, self._cluster, fault, target)
            self._later.append(_Later(time.monotonic() + fault.for_s, what, undo, shared, target.node, renew))
        return True

    def _done(self, fate: Fate, whom: str, nodes: tuple[str, ...], rank: int | None, t: float) -> None:
        fault = fate.fault
        fate.state, fate.why = DONE, ""
        fate.times += 1
        fate.generation = self._generation
        whom = whom if fault.groups == () else fault.whom
        if fate.t is None:
            fate.t, fate.whom, fate.nodes, fate.rank = t, whom, nodes, rank
        else:
            fate.again.append((t, nodes, rank))
        set_to = told(fault)
        message = f"{fault.what} {whom}" + (f" ({set_to})" if set_to else "")
        self._say(f"fault {fate.number}: {message}" + ("" if fault.at_s is not None else fault.when))
        self._log.write(
            "fault",
            number=fate.number,
            what=fault.what,
            where=whom,
            when=fault.when.strip(),
            node=nodes[0] if len(nodes) == 1 else "",
            rank=rank,
            message=message,
        )

    def _try(self, what: str, act: Callable[[], object]) -> None:
        """Do it; that it fails is told, and is no reason to leave a job alone in the midst of it."""
        try:
            act()
        except FAILURES as error:
            self._say(f"{what}: {error}")

    # ---- who is started again ------------------------------------------------------------------------

    def _returning(self) -> bool:
        return any(self._wants_to_return(index) for index in range(len(self._cluster.nodes)))

    def _wants_to_return(self, index: int) -> bool:
        if any(self._code(other) == constants.EXIT_DONE for other in range(len(self._cluster.nodes))):
            return False  # the job is over, and would be another one
        code = self._code(index)
        if code is None or self._starts >= MAX_STARTS:
            return False
        return index in self._back or code not in {constants.EXIT_AT_FAULT, constants.EXIT_USAGE}

    def _code(self, index: int) -> int | None:
        """How a node's agent ended; None while it runs, or where it has not been started."""
        agent = self._cluster.nodes[index].agent
        return None if agent is None else agent.poll()

    def _tend(self) -> None:
        """Start again who has been down for its time."""
        for index, node in enumerate(self._cluster.nodes):
            if not self._wants_to_return(index):
                self._down.pop(index, None)
                continue
            since = self._down.setdefault(index, time.monotonic())
            wait_s = self._back.get(index, AGAIN_S)
            if time.monotonic() >= since + wait_s:
                self._starts += 1
                self._back.pop(index, None)
                self._down.pop(index, None)
                self._say(f"{node.name} is started again, {duration(wait_s)} after its end")
                self._try(f"{node.name} could not be started", partial(self._cluster.start_node, index))
                for later in [one for one in self._later if one.node == index]:  # a start mends the link
                    self._try(later.what, later.renew)


def _places(fault: Fault, nodes: int) -> list[dict[str, object]]:
    """Whose passing of the point of its phase is its moment: one entry for each that may be meant."""
    if fault.role == "all" or fault.kind.hits == NODES:
        return [{}]
    if fault.kind.hits == WORKER and fault.point in IN_WORKER:
        return _conditions(fault, nodes, 0)
    return [{"node": f"n{node}"} for node in ([fault.node] if fault.node is not None else range(nodes))]


def _conditions(fault: Fault, nodes: int, workers: int) -> list[dict[str, object]]:
    """Whose failpoint is armed: one entry for each that is to be hit."""
    if fault.kind.hits != WORKER:
        return [{"node": f"n{node}"} for node in ([fault.node] if fault.node is not None else range(nodes))]
    if fault.role == "all":
        return [{"rank": rank} for rank in range(nodes * workers)]
    if fault.node is not None:
        return [{"node": f"n{fault.node}", "local": 0}]
    return [{"rank": 0 if fault.role == "rank-0" else fault.rank}]


def _at_step(fault: Fault) -> bool:
    """Whether it is armed for a step, and not for another point."""
    return fault_entry(fault).startswith("step=")


def _lasting(fault: Fault) -> float | None:
    return fault.for_s if fault.what == "slow-rank" else None
