"""Who of a job is dead, as its scheduler knows it: Slurm here, Kubernetes in `pods`.

A node that is silent may be dead, or train on behind a cut link. Who runs the cluster often knows which:
a node has been booted again, a pod is deleted. Each agent has a *home*, what its scheduler knows it by; an
`Oracle` is asked about homes and gives a `Verdict`.

Promise: "dead" and "alone" are said only of what is proved. That Slurm calls a node DOWN, or that it has
taken it out of the job, proves nothing: that is what becomes of a node that the controller cannot reach, and
its processes train on (seen with 22.05). No answer, or one that is not understood, is no proof. Old news
proves nothing either: a home names one boot of a node, or one pod, and never the next.

Does not know the rendezvous: what follows from a verdict is decided there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_resume.cluster import pods, slurm, slurm_job
from elastic_resume.cluster.verdict import Oracle, Verdict
from elastic_resume.errors import ConfigError

AUTO, DOWN, OFF = "auto", "down", "off"
MODES = (AUTO, DOWN, OFF)
REBOOTED_S = 600.0
"""A boot so much later than the one in which an agent started is another one. Munge refuses clocks that
differ by five minutes, so none is set by more while Slurm works."""
STEADY_S = 60.0
"""A node that answers and is not the job's must be seen so for so long: what Slurm finds there when a node is
back, it ends first (KillWait, 30 s)."""
UNSEEN_S = 30.0
"""What nobody has looked at for so long was not seen to be steady."""
MAX_NODES = 1000
ASKED_AT_ONCE = 50  # a line is some 700 bytes
NODE_STATES = {"IDLE", "ALLOCATED", "MIXED"}
HARMLESS = {"CLOUD", "DYNAMIC_NORM", "MAINTENANCE", "PLANNED", "RESERVED"}
OVER = {
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED", "PENDING"),
}
"""Of a job that Slurm itself runs nowhere; what it left where Slurm could not reach may run yet."""


def mode_of(text: str | None) -> str:
    """Read ``--scheduler-word``.

    Raises:
        ConfigError: it is none of its words.

    """
    if text is None or text in MODES:
        return text or AUTO
    raise ConfigError(f"--scheduler-word is {text!r}: write {', '.join(MODES)}.")


def home(environ: Mapping[str, str], proc: Path = Path("/proc")) -> str:
    """What the scheduler knows this agent by; empty where nothing would be proved by it."""
    if "SLURM_JOB_ID" in environ:
        node, booted = environ.get("SLURMD_NODENAME", ""), boot_time(proc)
        return f"slurm/{node}/{booted}" if re.fullmatch(r"[A-Za-z0-9._-]{1,255}", node) and booted else ""
    return pods.home(environ)


def boot_time(proc: Path = Path("/proc")) -> int:
    """When this machine was booted, by its own clock, from which Slurm has it too; 0 where nothing tells."""
    try:
        match = re.search(r"^btime ([0-9]{1,12})$", (proc / "stat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def oracle(environ: Mapping[str, str], mode: str) -> Oracle | None:
    """Give who can be asked from here; None where nobody can, or it is not wanted.

    Args:
        environ: of this agent.
        mode: of `mode_of`.

    """
    if mode == OFF or not home(environ):
        return None
    if "SLURM_JOB_ID" not in environ:
        return pods.oracle(environ)
    job = environ["SLURM_JOB_ID"]
    array, element = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    if array and element:
        job = f"{array}_{element}"
    try:
        nodes = slurm.hostnames(environ.get("SLURM_JOB_NODELIST", ""))
    except ConfigError:
        return None
    return Slurm(job, nodes, down_is_dead=mode == DOWN)


@dataclass(frozen=True)
class Machine:
    """A node as ``scontrol show node`` tells of it."""

    states: frozenset[str]
    booted: float | None

    @property
    def is_off(self) -> bool:
        """Whether Slurm has had it switched off."""
        return "POWERED_DOWN" in self.states

    @property
    def is_down(self) -> bool:
        """Whether Slurm counts it as failed."""
        return "DOWN" in self.states

    @property
    def answers(self) -> bool:
        """Whether it is in service, with nothing left on it to be ended."""
        return len(self.states & NODE_STATES) == 1 and self.states <= NODE_STATES | HARMLESS


def machines(text: str) -> dict[str, Machine]:
    """Read the lines of ``scontrol show node -o``, with times in UTC."""
    found = {}
    for line in text.splitlines():
        fields: dict[str, str] = {}
        # The first of each: what people write stands at the end of the line (Reason, Comment).
        for name, value in re.findall(r"(?:^|\s)(NodeName|State|BootTime)=(\S+)", line):
            fields.setdefault(name, value)
        if "NodeName" in fields and "State" in fields:
            states = re.sub(r"\*", "+NOT_RESPONDING", fields["State"].upper()).split("+")
            found[fields["NodeName"]] = Machine(
                frozenset(states), slurm_job.seconds(fields.get("BootTime", ""))
            )
    return found


class Slurm:
    """Slurm's word on one job.

    Proof that a node holds nobody of the job: Slurm does not run the job there, and the node has been booted
    since its agent started, or is switched off, or has been in service for a while without it.
    ``down_is_dead`` is the administrator's word that nodes which are DOWN are: they may be fenced off.
    """

    def __init__(
        self,
        job: str,
        nodes: Iterable[str],
        *,
        down_is_dead: bool = False,
        run: slurm_job.Run = slurm_job.run,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``job``: as ``squeue -j`` takes it; ``nodes``: what it was given at first."""
        self._job = job
        self._nodes = frozenset(nodes)
        self._down_is_dead = down_is_dead
        self._run = run
        self._clock = clock
        self._steady: dict[str, float] = {}
        self._asked_at = -UNSEEN_S

    def ask(self, missing: Collection[str], here: Collection[str]) -> Verdict:
        """See `verdict.Oracle`."""
        ours, theirs = _by_node(here), _by_node(missing)
        if ours is None or theirs is None:
            return Verdict(why="some run where Slurm does not know them")
        told = self._job_nodes()
        if told is None:
            return Verdict(why="squeue does not answer")
        runs, ran = told
        if not ours.keys() <= runs:
            return Verdict(
                why=f"Slurm does not run job {self._job} on {', '.join(sorted(ours.keys() - runs))}"
            )
        others = (runs | ran | self._nodes | theirs.keys()) - ours.keys()
        if len(others) > MAX_NODES:
            return Verdict(why=f"{len(others)} nodes are too many to ask about")
        known = self._machines(sorted(others))
        why = {node: self._doubt(known.get(node), theirs.get(node, ()), node in runs) for node in others}
        # Of those that answer, from when on: one that was seen otherwise begins anew.
        now = self._clock()
        since = self._steady if now < self._asked_at + UNSEEN_S else {}
        answering = {node for node in others if node in known and known[node].answers and node not in runs}
        self._asked_at, self._steady = now, {node: since.get(node, now) for node in answering}
        for node in answering:
            if now >= self._steady[node] + STEADY_S:
                why[node] = ""
        dead = frozenset(one for node in theirs if why.get(node) == "" for one in theirs[node])
        doubts = [f"{node} {why[node]}" for node in sorted(others) if why[node]]
        doubts += [f"another agent has run on {node}" for node in sorted(theirs.keys() & ours.keys())]
        return Verdict(dead, alone=not doubts, why="; ".join(doubts[:4]))

    def _doubt(self, machine: Machine | None, homes: Collection[str], runs: bool) -> str:
        """Why somebody of the job may live there; empty where that is proved not to be."""
        if runs:
            return "is the job's"
        if machine is None:
            return "is unknown to scontrol"
        booted = [_booted(one) for one in homes]
        if booted and machine.booted is not None and machine.booted >= max(booted) + REBOOTED_S:
            return ""
        if machine.is_off or (machine.is_down and self._down_is_dead):
            return ""
        return f"is {'+'.join(sorted(machine.states))}" + " for less than a minute" * machine.answers

    def _job_nodes(self) -> tuple[set[str], set[str]] | None:
        """Where Slurm runs the job, and where it has run it; None where that cannot be told."""
        words = ["squeue", "-h", "-r", "-t", "all", "-j", self._job, "-o", "%T|%N"]
        answer = self._run(words, slurm_job.ASK_S)
        if answer.code != 0 or len(answer.text) >= slurm_job.MAX_TEXT - 1:
            return None
        runs: set[str] = set()
        ran: set[str] = set()
        for line in answer.text.splitlines():
            state, _, text = line.partition("|")
            try:
                names = slurm.hostnames(text.strip()) if text.strip() else []
            except ConfigError:
                return None
            (ran if state.strip() in OVER else runs).update(names)
        return runs, ran

    def _machines(self, nodes: list[str]) -> dict[str, Machine]:
        found: dict[str, Machine] = {}
        for start in range(0, len(nodes), ASKED_AT_ONCE):
            words = ["scontrol", "show", "node", "-o", ",".join(nodes[start : start + ASKED_AT_ONCE])]
            found |= machines(self._run(words, slurm_job.ASK_S).text)
        return found


def _by_node(homes: Collection[str]) -> dict[str, list[str]] | None:
    """Sort homes by node; None where one is not Slurm's."""
    found: dict[str, list[str]] = {}
    for one in homes:
        match = re.fullmatch(r"slurm/([^/]+)/[0-9]{1,12}", one)
        if match is None:
            return None
        found.setdefault(match[1], []).append(one)
    return found


def _booted(one: str) -> float:
    return float(one.rpartition("/")[2])
