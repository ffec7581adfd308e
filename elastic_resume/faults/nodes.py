"""Simulated nodes as one sees them from outside: what they have told, kept and printed, and waiting for it.

What is waited for are facts, in the nodes' event files and on the pages where their ranks note each step;
never a guess of time. Looking changes nothing, and goes on when nodes are dead.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import psutil

from elastic_resume import contract, events
from elastic_resume.errors import UsageError
from elastic_resume.events import Event
from elastic_resume.faults import ending
from elastic_resume.faults.grounds import Loopback
from elastic_resume.faults.moments import Moments
from elastic_resume.report import incidents, render, story
from elastic_resume.store import board
from elastic_resume.store.catalog import Catalog, Entry

T = TypeVar("T")

POLL_S = 0.02
TAIL = 4000  # characters of each node's output in an error


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
    agent: ending.Agent | None = None
    killed: bool = False  # by whoever simulates it, since its last start
    waited_for: bool = False  # `wait_exit` has given how it ended, since its last start

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


class Nodes:
    """Several simulated nodes of one job."""

    def __init__(self, directory: Path, run_id: str, ground: Loopback, workers_per_node: int) -> None:
        """See the nodes that stand on ``ground`` and keep what they do below ``directory``."""
        self.directory = directory
        self.run_id = run_id
        self.ckpt_dir = directory / "checkpoints"
        self.run_dir = self.ckpt_dir / run_id
        self.nodes: list[Node] = []
        self._ground = ground
        self.workers_per_node = workers_per_node
        self._moments = Moments(self.lines)

    # ---- what can be seen ----------------------------------------------------------------------------

    def events(self, kind: str | None = None) -> list[Event]:
        """All events of all nodes by time, or those of one kind; without those on a disk that fails."""
        try:
            found = events.read_run(self.run_dir)
        except OSError:
            told = (event for index in range(len(self.nodes)) for event in self.events_of(index))
            found = sorted(told, key=lambda event: event["t"])
        return [event for event in found if kind in (None, event["event"])]

    def events_of(self, index: int, kind: str | None = None) -> list[Event]:
        """One node's events by time, or those of one kind; none while its disk fails."""
        with contextlib.suppress(OSError):
            found = events.read(self.nodes[index].directory / contract.EVENTS_FILE)
            wanted = (event for event in found if kind in (None, event["event"]))
            return sorted(wanted, key=lambda event: event["t"])
        return []

    def checkpoints(self, index: int) -> list[Entry]:
        """A node's checkpoints, newest first, each with what is wrong with it, if anything."""
        return Catalog(self.nodes[index].directory, self.run_id).entries()

    def output(self, index: int) -> str:
        """All that a node's agent and workers have printed."""
        log = self.nodes[index].log
        return log.read_text(errors="replace") if log.exists() else ""

    def processes(self, index: int) -> list[psutil.Process]:
        """A node's agent and all of its descendants that are alive."""
        return self._ground.processes(index)

    def process(self, index: int, pid: int) -> psutil.Process | None:
        """The process of a node with this id; None: it has ended."""
        return next((one for one in self.processes(index) if one.pid == pid), None)

    def lines(self) -> Iterator[tuple[int, board.Line]]:
        """What each rank has noted of the step that it finished last: node, and line of its board."""
        for index, node in enumerate(self.nodes):
            for line in board.read_lines(node.directory / contract.BOARD_FILE, self.workers_per_node):
                yield index, line

    @property
    def lost_steps(self) -> int:
        """How many steps that had been finished were run again, over all failures so far."""
        return incidents.tell(self.events()).lost_steps

    @property
    def recoveries(self) -> list[Recovery]:
        """The failures that the job has recovered from so far, in order."""
        rows = incidents.tell(self.events()).generations
        return [
            Recovery(following.number, row.end.text, row.recovered_s, row.lost_steps)
            for row, following in itertools.pairwise(rows)
            if row.end.is_failure
        ]

    def table(self) -> str:
        """What `elastic-resume report` tells of the run so far."""
        return render.as_text(story.tell(self.events()))

    def tails(self) -> str:
        """What each node has printed last."""
        return "\n".join(f"--- {n.name}\n{self.output(i)[-TAIL:]}" for i, n in enumerate(self.nodes))

    # ---- waiting -------------------------------------------------------------------------------------

    @overload
    def wait(self, look: Callable[[], T | None], what: str, timeout_s: float = 120.0) -> T: ...

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
        look: Callable[[], Any] | None = None,
        what: str = "",
        timeout_s: float = 120.0,
        *,
        step: int | None = None,
        generation: int | None = None,
        commit: int | None = None,
        node: int | None = None,
    ) -> Any:
        """Wait for a fact, and give the event that tells of it; or what ``look`` gives, once that is true.

        Args:
            look: is called until it gives something true.
            what: it looks for, for the error.
            timeout_s: limit.
            step: until a rank has finished this step or a later one.
            generation: until this generation or a later one has resumed; with ``step``: of such a one.
            commit: until a checkpoint of this step or a later one is on a disk.
            node: with ``step`` and ``commit``: on this node.

        Raises:
            ClusterTimeoutError: not within ``timeout_s``, or no node is left to make it happen.
            MomentError: something that was planned with `at` went wrong.

        """
        if look is None:
            look, what = self._fact(step, generation, commit, node)
        deadline = time.monotonic() + timeout_s
        while True:
            idle = not any(one.alive for one in self.nodes)
            self._moments.complain()
            found = look()
            if found:
                return found
            if idle or time.monotonic() > deadline:
                why = "no node runs any more" if idle else f"{timeout_s:.0f} s went by"
                raise ClusterTimeoutError(f"{what}: {why}.\n{self.tails()}")
            time.sleep(POLL_S)

    def _fact(
        self, step: int | None, generation: int | None, commit: int | None, node: int | None
    ) -> tuple[Callable[[], Event | None], str]:
        """Make a look for one event, and words for it."""
        if [step is None and generation is None, commit is None].count(False) != 1:
            raise UsageError("wait for step=, for generation=, for both, or for commit=; or give a look.")
        kind, least = ("commit", commit) if commit is not None else ("step", step)
        if least is None:
            kind = "resume"
        on = "" if node is None else f" on {self.nodes[node].name}"
        of = "" if generation is None else f" of generation {generation}"
        words = {"commit": f"a checkpoint of step {least}", "step": f"step {least}{of}", "resume": of[4:]}

        def look() -> Event | None:
            found = self.events(kind) if node is None else self.events_of(node, kind)
            wanted = (e for e in found if e["step"] >= (least or 0) and e["generation"] >= (generation or 0))
            return next(wanted, None)

        return look, words[kind] + on

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
        chosen = [one for one in self.nodes if one.alive or not one.waited_for]
        if only is not None:
            chosen = [self.nodes[index] for index in only]
        deadline = time.monotonic() + timeout_s
        while running := [one for one in chosen if one.alive]:
            self._moments.complain()
            if time.monotonic() > deadline:
                names = ", ".join(one.name for one in running)
                raise ClusterTimeoutError(f"{names}: not ended within {timeout_s:.0f} s.\n{self.tails()}")
            time.sleep(POLL_S)
        ended = [one for one in chosen if one.agent is not None and (only is not None or not one.killed)]
        codes = [one.agent.wait() for one in ended if one.agent is not None]
        for one in ended:
            one.waited_for = True
        self._moments.complain()
        if not any(one.alive for one in self.nodes) and not any(codes):
            self._moments.require_all()
        return codes
