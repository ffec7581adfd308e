"""Keeps a node's history of rounds, asks the policy what to do, and speaks to the user.

Promise: what is decided and why is said in a line and stands in the event log. A failure is told to the other
nodes before this one asks for another world; so what the policy is asked about is what all nodes know. How
workers ended is read from memory (`round_events`): a disk that is full or fails changes no decision.

Does not know how worlds form (`handler`), nor what the policy is (`policy.restart`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from elastic_resume import constants, events
from elastic_resume.agent.memory_pressure import Gauge
from elastic_resume.agent.round_events import RoundEvents
from elastic_resume.agent.workers.lease_page import Fence
from elastic_resume.errors import GaveUpError, NodeUnfitError
from elastic_resume.policy import checkpoint_interval, failure_classification, restart
from elastic_resume.policy.failure_classification import Failure, Verdict, describe, judge
from elastic_resume.policy.requeue import idle_lives
from elastic_resume.rendezvous.core.events import Log
from elastic_resume.snapshot.progress_page import MAX_LOCAL_RANKS, Line, Worker, read_lines

# What the rendezvous tells that a person wants to read; the rest is in the event log only.
TOLD = {"waiting", "refused", "spare", "disk", "stranger", "late", "forced", "through"}


class Witness:
    """The observer of one agent's rendezvous (`handler.Observer`)."""

    def __init__(
        self,
        node: str,
        log: events.EventLog,
        path: Path,
        fence: Fence,
        round_events: RoundEvents,
        *,
        limits: restart.Limits | None = None,
        gauge: Gauge | None = None,
    ) -> None:
        """``path`` is that of the node's log; ``gauge`` tells of its memory."""
        self.between: Callable[[], object] = lambda: None  # called when the workers of a round are dead
        self._began = time.monotonic()
        self._node = node
        self._log = log
        self._path = path
        self._fence = fence
        self._round_events = round_events
        self._limits = limits or restart.Limits()
        self._gauge = gauge
        self._history: list[restart.Round] = []
        self._round = 0
        self._generation: int | None = None
        self._nodes = 1
        self._rank: int | None = None
        self.stands_by = False  # a world runs without this node
        self._world = restart.World()
        self._offset = 0  # of the first event of the round, in the node's file
        self._stale: frozenset[Worker] = frozenset()  # on the board before the round began
        self._why_over = ""
        self._verdict = Verdict()  # of the last round that failed anywhere
        self._untold = ""  # the traceback of our own part in it
        self._told = ""  # the last that was printed

    @property
    def rank(self) -> int | None:
        """This node's rank in the last world; None where there was none."""
        return self._rank

    def idle_lives(self, restarts: int) -> int:
        """How many lives of the job in a row, this one included, have brought no new step on this node."""
        if any(this.stepped for this in (*self._history, self._summary(failed=False))):
            return 0
        return idle_lives(self._logged(0), restarts)

    def say(self, text: str) -> None:
        """Print one line for people."""
        with contextlib.suppress(OSError):  # a terminal or a pipe that is gone must not end the job
            print(f"elastic_resume[{self._node}] {text}", file=sys.stderr, flush=True)

    def told(self, news: Log) -> None:
        """Note what the rendezvous did, and say what a person wants to know of it."""
        self._log.write("rendezvous", what=news.kind, message=news.text)
        if news.kind == "spare":
            self.stands_by = True
        if news.kind in TOLD:
            self.say(news.text)

    def note(self, event: str, /, **fields: object) -> None:
        """Write an event into the node's log."""
        self._log.write(event, **fields)

    def round_over(self) -> None:
        """Let the workers of this round be killed at once where torchelastic asks them to end."""
        self._fence.end_round(self._round)

    # ---- between two rounds ----------------------------------------------------------------------------

    def account(self) -> restart.Account:
        """Tell what became of the round that ended: to be known by others before anything is decided."""
        this = self._summary(failed=False)
        history = [*self._history, replace(this, failed=bool(this.failures))]
        return restart.Account(this.verdict.root, restart.newest_step(history), self._pause_s(history))

    def _pause_s(self, history: Sequence[restart.Round]) -> float:
        """How long to wait: not for what came from elsewhere, nor where no other start is likely."""
        root = history[-1].verdict.root
        if root is None or root.is_echo or self._likely(history).action is not restart.Action.GO_ON:
            return 0.0
        return restart.pause_s(history)

    def _likely(self, history: Sequence[restart.Round]) -> restart.Decision:
        """What is decided if no other node has failed."""
        return restart.decide(history, self._limits, self._world)

    def before_round(self, *, failed: bool, why: str = "") -> None:
        """Judge the round that ended; raise GaveUpError or NodeUnfitError when there is to be no other.

        Only what is sure without the other nodes is judged here.
        """
        self.between()
        # Others may have been told of the end before our own part in it was noticed.
        this = self._summary(failed=failed)
        this = replace(this, failed=failed or bool(this.failures))
        self._history.append(this)
        self._verdict, self._untold = this.verdict, self._traceback(this.verdict.root)
        for failure in this.failures:
            if failure.kind == failure_classification.STUCK:
                self._leave(
                    f"{describe(failure)}. Nothing can be started beside it: repair or reboot this node."
                )
        if not this.failed:
            self.say(f"{why or 'nodes have come or gone'}: forming a new world.")
            return
        root = this.verdict.root
        if root is not None and root.at_fault:
            decision = restart.decide(self._history, self._limits)
            if decision.give_up:
                self._give_up(decision.reason)
        pause_s = self._pause_s(self._history)
        told = "; starting again" if self._likely(self._history).action is restart.Action.GO_ON else ""
        told += f" in {pause_s:g} s, since nothing has advanced" if pause_s else ""
        self.say(f"{describe(root)}{told}.")

    def round_formed(
        self,
        *,
        node_rank: int,
        num_nodes: int,
        generation: int,
        changed: bool = False,
        nodes: Sequence[str] = (),
        step: int = 0,
        told: Sequence[Failure] = (),
    ) -> None:
        """Note a new round; its workers start now. Raise GaveUpError or NodeUnfitError when they should not.

        ``told`` is what the coordinator heard of the last round's end, ``step`` how far any member has come.
        """
        self._world = restart.World(tuple(nodes), step)
        if self._history:
            self._judge(told, changed=changed)
        self._round += 1
        self._nodes, self._rank, self.stands_by = num_nodes, node_rank, False
        self._generation = generation
        self._offset = _size(self._path)
        # In a container each life's agent has the same pid, and the board's volume may outlive the pod.
        self._stale = frozenset(line.worker for line in self._lines())
        self._round_events.clear()
        if self._gauge is not None:
            self._gauge.mark()
        failed = sum(one.failed for one in self._history)
        mtbf = checkpoint_interval.mtbf_s(failed, time.monotonic() - self._began)
        os.environ[constants.ENV_MTBF_S] = f"{mtbf:.3f}"
        os.environ[constants.ENV_ROUND] = str(self._round)  # torchelastic hands its environment to workers
        os.environ[constants.ENV_GENERATION] = str(generation)
        self._log.write(
            "round", round=self._round, node_rank=node_rank, num_nodes=num_nodes, generation=generation
        )
        self.say(f"generation {generation}: node {node_rank} of {num_nodes}.")

    def _judge(self, told: Sequence[Failure], *, changed: bool) -> None:
        """Judge the last round by what all nodes know of it."""
        own = self._history[-1].verdict.root
        last = self._history[-1] = restart.learned(self._history[-1], told, changed=changed)
        if told:
            self._verdict = last.verdict
            self._log.write(
                "verdict",
                generation=self._generation,
                causes=[asdict(one) for one in last.verdict.causes],
                cascade=[asdict(one) for one in last.verdict.cascade],
            )
            root = last.verdict.root
            if (
                root is not None
                and root.node != self._node
                and root.kind not in failure_classification.OF_NODES
            ):
                followed = " What failed here followed from that." if own is not None and own.is_echo else ""
                self.say(f"{describe(root, node=True)}.{followed}")
        decision = restart.decide(self._history, self._limits, self._world)
        if decision.give_up:
            self._give_up(decision.reason)
        if decision.action is restart.Action.EXCLUDE:
            if decision.node == self._node:
                self._leave(decision.reason)
            self.say(f"node {decision.node} is to leave: {decision.reason}")
        if self._untold and self._untold != self._told:
            self._print(self._untold)
        self._untold = ""

    def _give_up(self, reason: str) -> None:
        self._why_over = f"node {self._node} gave up: {reason}"
        raise GaveUpError(self._why_over)

    def _leave(self, reason: str) -> None:
        raise NodeUnfitError(f"node {self._node} leaves the job: {reason}")

    # ---- the end ---------------------------------------------------------------------------------------

    def last_words(self, *, workers_failed: bool = False) -> str:
        """Why this node ends the job for all nodes; empty when its workers finished.

        ``workers_failed``: torchelastic has ended because they did, and asked nobody.
        """
        if workers_failed and not self._why_over:
            this = self._summary(failed=True)
            root = this.verdict.root
            if root is not None:
                self._verdict, self._untold = this.verdict, self._traceback(root)
                self._why_over = f"node {self._node} gave up: {describe(root)}."
        return self._why_over

    def heard(self, told: Sequence[Failure]) -> None:
        """Take in what the coordinator heard of failures before the job ended."""
        if told:
            self._verdict = judge(told)

    def explain_end(self, logs: str = "") -> None:
        """Say what failed first and what followed, with the user's traceback, and where the rest is.

        ``logs`` is where the user has the workers' output put.
        """
        verdict, root = self._verdict, self._verdict.root
        if root is None:
            return
        for line in failure_classification.explain(verdict):
            self.say(line)
        if root.node == self._node:
            trace = self._untold or self._traceback(root)
            if trace:
                self._print(trace)
        elif root.kind not in failure_classification.OF_NODES and root.type:
            self.say(f"its traceback is in the output and in the events of node {root.node}.")
        places = [f"events in {self._path}"]
        places += [f"stacks of the hang in {path}" for path in self._hang_reports()[-1:]]
        places += [f"workers' output in {logs}"] if logs else []
        self.say(f"more: {'; '.join(places)}.")

    def _print(self, trace: str) -> None:
        self._told = trace
        with contextlib.suppress(OSError):
            print(trace.rstrip("\n"), file=sys.stderr, flush=True)

    def _traceback(self, failure: Failure | None) -> str:
        """The traceback that a worker of this node left in its event, if it printed a line only."""
        if failure is None or failure.node != self._node:
            return ""
        for event in self._round_events.read():
            if event["event"] == "failure" and event.get("type") == failure.type:
                rank = event.get("rank")
                if (rank is None or rank == failure.rank) and isinstance(event.get("traceback"), str):
                    return str(event["traceback"])
        return ""

    def _hang_reports(self) -> list[str]:
        found = (event for event in self._round_events.read() if event["event"] == "hang")
        return [str(event["report"]) for event in found if event.get("report")]

    def _summary(self, *, failed: bool) -> restart.Round:
        return restart.summarize(
            [*self._round_events.read(), *self._steps()],
            node=self._node,
            failed=failed,
            nodes=self._nodes,
            strain=self._gauge.strain() if self._gauge is not None else None,
        )

    def _steps(self) -> list[events.Event]:
        """How far this round came: by the log, and by the board, which has steps that a full disk refused."""
        lines = [line for line in self._lines() if line.worker not in self._stale]
        ours = [
            line for line in lines if (line.worker.agent_pid, line.worker.round) == (os.getpid(), self._round)
        ]
        logged = [event for event in self._logged(self._offset) if event["event"] in {"step", "commit"}]
        return [*logged, *({"event": "step", "step": line.step} for line in ours)]

    def _lines(self) -> list[Line]:
        return read_lines(self._path.with_name(constants.BOARD_FILE), MAX_LOCAL_RANKS)

    def _logged(self, offset: int) -> list[events.Event]:
        """What the node's log holds from there on, as far as its disk gives it."""
        found: list[events.Event] = []
        with contextlib.suppress(OSError):
            found.extend(events.read(self._path, offset))  # keeps what comes before an error
        return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
