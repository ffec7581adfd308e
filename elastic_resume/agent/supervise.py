"""One agent's life: own the node's directory, run the job, say in plain words what happened.

Promise: the directory is claimed before anything starts and given up at the end, or by the kernel when the
agent is killed. Every round, and the end with its exit code, is in the event log before it is acted on.
Does not know how worlds form or workers start (`elastic`), nor when to give up (`policy.restart`).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_resume import contract, events
from elastic_resume.agent import elastic, preflight
from elastic_resume.agent.fence import Fence
from elastic_resume.agent.place import taken
from elastic_resume.agent.warm import Warmth
from elastic_resume.config import Settings
from elastic_resume.errors import ElasticResumeError, GaveUpError
from elastic_resume.policy import restart
from elastic_resume.rendezvous.steps import Log
from elastic_resume.store.node_dir import NodeDir

# What the rendezvous tells that a person wants to read; the rest is in the event log only.
TOLD = {"waiting", "refused", "spare", "disk", "stranger", "late", "minority", "through"}


def run_agent(settings: Settings, args: argparse.Namespace, given: set[str]) -> int:
    """Run the job's part on this node and give the exit code of the command.

    Args:
        settings: ours.
        args: torchrun's, of `config.parse_layers`.
        given: the names of those that the user gave.

    Raises:
        ElasticResumeError: nothing was started.

    """
    with (
        elastic.prepared(args, given, settings.run_id) as launch,
        NodeDir.claim(settings.ckpt_dir, settings.run_id, settings.node_name) as node_dir,
        contextlib.closing(Fence()) as fence,
    ):
        events_path = node_dir.path / contract.EVENTS_FILE
        _set_environment(settings, args, events_path, fence)
        log = events.EventLog(events_path, node=settings.node_name)
        witness = Witness(settings.node_name, log, events_path, fence)
        config = launch.config
        log.write(
            "agent-start",
            run_id=settings.run_id,
            command=shlex.join([args.training_script, *args.training_script_args]),
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_world_size=config.nproc_per_node,
        )
        witness.say(f"job {settings.run_id}, checkpoints in {node_dir.path}")
        with _warmth(launch, args, witness):
            outcome, code, message = _run(launch, witness, node_dir, fence)
        log.write("agent-end", outcome=outcome, exit_code=code, message=message)
        if message:
            witness.say(f"{outcome}: {message}")
        log.close()
        return code


@contextlib.contextmanager
def _warmth(launch: elastic.Launch, args: argparse.Namespace, witness: Witness) -> Iterator[None]:
    """Have a zygote where there can be one."""
    if launch.command is None:
        if launch.why_cold:
            witness.say(f"workers start cold: {launch.why_cold}.")
        yield
        return
    preload = [name.strip() for name in (args.preload or "").split(",") if name.strip()]
    warmth = Warmth(launch.command, preload, say=witness.say, tell=witness.note)
    warmth.start()
    try:
        yield
    finally:
        warmth.close()


def _run(launch: elastic.Launch, witness: Witness, node_dir: NodeDir, fence: Fence) -> tuple[str, int, str]:
    """Give outcome, exit code and message for people."""
    end = ""
    try:
        if launch.terms is None:
            fence.set(math.inf)  # there is no lease: a stock rendezvous never says who is lost
            elastic.launch(launch, witness, None)
        else:
            with taken(launch.terms, node_dir, fence, say=witness.say, tell=witness.told) as place:
                elastic.launch(launch, witness, place)
                end = f"{place.member.end}."
    except elastic.StoppedError as stop:
        # SIGUSR1 is how schedulers ask ahead of time for what SIGTERM asks.
        number = signal.SIGTERM if stop.signal == signal.SIGUSR1 else stop.signal
        return "signalled", contract.EXIT_SIGNALLED + number, f"stopped by {stop.signal.name}."
    except ElasticResumeError as error:
        return "failed", contract.EXIT_AT_FAULT if error.at_fault else contract.EXIT_REQUEUE, str(error)
    return "done", contract.EXIT_DONE, end


def _set_environment(settings: Settings, args: argparse.Namespace, events_path: Path, fence: Fence) -> None:
    os.environ.update(settings.to_env())
    os.environ.pop(contract.ENV_TOKEN, None)  # read by now, and no business of the training script
    os.environ[contract.ENV_AGENT_PID] = str(os.getpid())
    os.environ[contract.ENV_EVENTS_PATH] = str(events_path)
    os.environ[contract.ENV_FENCE] = fence.path
    grace_s = preflight.check_grace(args.grace)
    if grace_s is not None:
        os.environ[contract.ENV_GRACE_S] = f"{grace_s:g}"
    elif getattr(args, "shutdown_timeout", None) is not None:
        os.environ.setdefault(contract.ENV_GRACE_S, str(args.shutdown_timeout))


class Witness:
    """Keeps the node's history, asks the policy, and speaks to the user."""

    def __init__(
        self,
        node: str,
        log: events.EventLog,
        path: Path,
        fence: Fence,
        limits: restart.Limits | None = None,
    ) -> None:
        self._node = node
        self._log = log
        self._path = path
        self._fence = fence
        self._limits = limits or restart.Limits()
        self._history: list[restart.Round] = []
        self._round = 0
        self._offset = 0  # of the first event of the round, in the node's file
        self._why_over = ""

    def say(self, text: str) -> None:
        """Print one line for people."""
        with contextlib.suppress(OSError):  # a terminal or a pipe that is gone must not end the job
            print(f"elastic_resume[{self._node}] {text}", file=sys.stderr, flush=True)

    def told(self, news: Log) -> None:
        """Note what the rendezvous did, and say what a person wants to know of it."""
        self._log.write("rendezvous", what=news.kind, message=news.text)
        if news.kind in TOLD:
            self.say(news.text)

    def note(self, event: str, /, **fields: Any) -> None:
        """Write an event into the node's log."""
        self._log.write(event, **fields)

    def round_over(self) -> None:
        """Let the workers of this round be killed at once where torchelastic asks them to end."""
        self._fence.end_round(self._round)

    def before_round(self, *, failed: bool, why: str = "", may_be_victim: bool = False) -> None:
        """Judge the round that ended; raise GaveUpError when there is to be no other."""
        this = self._summary(failed=failed)
        if this.failure is not None:
            # Others may have been told of the end before our own part in it was noticed.
            this = replace(this, failed=True)
        self._history.append(this)
        if not this.failed:
            self.say(f"{why or 'nodes have come or gone'}: forming a new world.")
            return
        decision = restart.decide(self._history, self._limits)
        sure = not may_be_victim or (this.failure is not None and this.failure.at_fault)
        if decision.give_up and sure:
            self._give_up(decision.reason)
        self.say(f"{restart.describe(this.failure)}; starting again.")

    def round_formed(
        self, *, node_rank: int, num_nodes: int, generation: int | None = None, changed: bool = False
    ) -> None:
        """Note a new round; its workers start now. Raise GaveUpError when they should not."""
        if self._history and self._history[-1].failed:
            if changed:
                # What died took our workers along: their failure says nothing about the job.
                self._history[-1] = replace(self._history[-1], failed=False)
            decision = restart.decide(self._history, self._limits)
            if decision.give_up:
                self._give_up(decision.reason)
        self._round += 1
        self._offset = _size(self._path)
        os.environ[contract.ENV_ROUND] = str(self._round)  # torchelastic hands its environment to workers
        name = f"round {self._round}"
        fields = {}
        if generation is not None:
            os.environ[contract.ENV_GENERATION] = str(generation)
            name, fields = f"generation {generation}", {"generation": generation}
        self._log.write("round", round=self._round, node_rank=node_rank, num_nodes=num_nodes, **fields)
        self.say(f"{name}: node {node_rank} of {num_nodes}.")

    def _give_up(self, reason: str) -> None:
        self._why_over = f"node {self._node} gave up: {reason}"
        raise GaveUpError(self._why_over)

    def last_words(self, *, workers_failed: bool = False) -> str:
        """Why this node ends the job for all nodes; empty when its workers finished.

        ``workers_failed``: torchelastic has ended because they did, and asked nobody.
        """
        if workers_failed and not self._why_over:
            failure = self._summary(failed=True).failure
            if failure is not None:
                self._why_over = f"node {self._node} gave up: {restart.describe(failure)}."
        return self._why_over

    def _summary(self, *, failed: bool) -> restart.Round:
        return restart.summarize(events.read(self._path, self._offset), failed=failed)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
