"""What agents do, told as scenario files: commands, and what is then seen to happen.

A file's name is the sentence that it proves. `>` lines are commands, `#` lines say why, the rest is what
happened until the next command. With ELASTIC_RESUME_REWRITE=1 the files are written anew: read the diff.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.policy.divergence import RESUME_FROM_MAJORITY, summarize_divergence
from elastic_resume.policy.failure_classification import describe_failure
from elastic_resume.rendezvous.core.events import (
    EmitEvent,
    EndJob,
    ForceQuorum,
    GiveUp,
    KillWorkers,
    ReportDivergence,
    RestartWorkers,
    Settings,
    StartWorkers,
)
from elastic_resume.rendezvous.core.messages import EndView, ProposeView, Welcome
from tests.support.paths import SCENARIOS
from tests.support.rendezvous_sim.checkers import InvariantChecker
from tests.support.rendezvous_sim.cures import undo_fix
from tests.support.rendezvous_sim.net import Clock, ConnectionEnd, Network
from tests.support.rendezvous_sim.node import SimulatedNode

FILES = sorted(SCENARIOS.glob("*.txt"))
REWRITE = os.environ.get("ELASTIC_RESUME_REWRITE") == "1"


class Steady(random.Random):
    """Chance that never varies: every packet and write takes half of its longest time."""

    def random(self) -> float:
        """Half."""
        return 0.5


class Stage:
    """One job, driven by a scenario's commands."""

    def __init__(self, job: str) -> None:
        told = dict(word.split("=") for word in job.split())
        low, high = told.get("nnodes", "1:9").split(":")
        settings = Settings(
            tuple(told["candidates"].split(",")),
            int(low),
            int(high),
            join_timeout_s=float(told.get("join_timeout", 600)),
            heartbeats_per_timeout=int(told.get("beats", Settings(()).heartbeats_per_timeout)),
            resume_from_majority=told.get("on_divergence") == RESUME_FROM_MAJORITY,
        )
        self.clock = Clock()
        self.net = Network(self.clock, Steady())
        self.checkers = InvariantChecker()
        self.nodes: dict[str, SimulatedNode] = {}
        self.seen: list[str] = []
        for place, name in enumerate(told["nodes"].split(",")):
            own = replace(settings, node_timeout_s=5.0) if name == told.get("other_timeout") else settings
            node = self.nodes[name] = SimulatedNode(name, own, self.net, self.checkers)
            node.order = place if "ordered" in told else 0
            node.trace = self.tell

    def tell(self, name: str, what: object) -> None:
        """Note what people would notice."""
        if isinstance(what, StartWorkers):
            members = " ".join(str(one) for one in what.members)
            text = f"begins generation {what.generation} as rank {what.rank} of {members}; store {what.store_address}"
            told = "; ".join(describe_failure(one, with_node=True) for one in what.failures)
            text += f", after: {told}" * bool(told)
        elif isinstance(what, (RestartWorkers, KillWorkers)):
            verb = "restarts" if isinstance(what, RestartWorkers) else "kills its workers of"
            text = f"{verb} generation {what.generation}: {what.reason}"
        elif isinstance(what, ReportDivergence):
            verdict = what.divergence.verdict
            text = f"hears that {summarize_divergence(verdict)}; equal at step {verdict.agreed_step}"
        elif isinstance(what, EndJob):
            told = "; ".join(describe_failure(one, with_node=True) for one in what.failures)
            text = f"ends the job: {what.reason}" + f", after: {told}" * bool(told)
        elif isinstance(what, GiveUp):
            text = f"gives up: {what.reason}"
        elif isinstance(what, EmitEvent):
            text = f"({what.kind}) {what.text}"
        else:
            return
        self.seen.append(f"{self.clock.now:7.2f}  {name}  {text}")

    def do(self, command: str) -> None:
        """Carry out one command."""
        verb, *words = command.split()
        if verb == "run":
            self.clock.run_until(self.clock.now + float(words[0]))
        elif verb == "cut":
            self.net.set_blocked_links(cut_between([group.split() for group in " ".join(words).split("|")]))
        elif verb == "one-way":
            self.net.set_blocked_links({(words[0], word) for word in words[1:]})
        elif verb == "cut-links":
            self.net.set_blocked_links({pair for word in words for pair in directions(word)})
        elif verb == "lose-large-messages-to":
            self.lose_large_messages_to(words[0])
        elif verb == "heal":
            self.net.set_blocked_links(set())
        elif verb == "reset":
            self.net.reset_connections(*words)
        elif verb == "reset-only-at":
            self.net.reset_connections(*words, both=False)
        elif verb == "slow":
            self.net.slow_delay_s[words[0]] = float(words[1])
        elif verb == "digest":
            for word in words[1:]:
                name, _, tensors = word.partition("=")
                self.nodes[name].send_digest(int(words[0]), tensors)
        elif verb == "force-quorum":
            self.nodes[words[0]].deliver_event(
                ForceQuorum(int(words[1])), self.nodes[words[0]].incarnation_id
            )
        else:
            for name in words:
                self.do_to(verb, self.nodes[name])

    def lose_large_messages_to(self, name: str) -> None:
        """Carry heartbeats to that node and nothing larger, as a path does that drops large packets."""
        send = self.net.send

        def send_small(end: ConnectionEnd, payload: Any) -> None:
            large = isinstance(payload[1], (Welcome, ProposeView, EndView))
            if not (large and end.peer and end.peer.host == name):
                send(end, payload)

        self.net.send = send_small  # type: ignore[method-assign]

    def do_to(self, verb: str, node: SimulatedNode) -> None:
        """Carry out one command for one node."""
        if verb == "kill":
            node.die()
        elif verb == "unplug":
            node.die(power=True)
        elif verb == "wipe":
            node.saved_state = None
        elif verb == "worker-fails":
            node.fail_worker()
        elif verb == "worker-breaks-off":
            node.fail_worker("was killed by SIGABRT")
        elif verb == "slow-disk":
            node.max_write_s = 20.0
        elif verb == "give-up":
            node.fail_job(f"node {node.name} gave up")
        else:
            {
                "boot": node.boot,
                "pause": node.pause,
                "resume": node.resume,
                "finish": node.finish,
                "leave": node.leave,
            }[verb]()


def directions(link: str) -> set[tuple[str, str]]:
    """Read `a-b`, both directions between two nodes, or `a>b`, one."""
    one, other = link[0], link[-1]
    return {(one, other)} if link[1] == ">" else {(one, other), (other, one)}


def cut_between(groups: list[list[str]]) -> set[tuple[str, str]]:
    """Every direction between nodes of different groups."""
    return {(a, b) for one in groups for other in groups if one is not other for a in one for b in other}


def play(text: str) -> str:
    """Carry out a scenario's commands and return it with what really happened."""
    stage: Stage | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            lines.append(line)
        elif line.startswith("> job"):
            stage = Stage(line.removeprefix("> job"))
            lines.append(line)
        elif line.startswith("> ") and stage:
            stage.seen = []
            stage.do(line[2:])
            lines += [line, *stage.seen]
    assert stage is not None, "a scenario begins with '> job'"
    assert not stage.checkers.violations or "> force-quorum" in text, stage.checkers.violations
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_scenario(path: Path) -> None:
    """What happens is what the file tells."""
    text = path.read_text()
    happened = play(text)
    if REWRITE:
        path.write_text(happened)
    assert happened == text or REWRITE


@pytest.mark.parametrize(
    ("cure", "scenario"),
    [
        ("a-spare-is-not-asked", "a-spare-that-reads-a-goodbye-late-goes-on-alone-with-nothing"),
        (
            "grace-for-those-left-behind",
            "a-leader-that-yields-has-the-other-wait-for-those-it-cannot-reach",
        ),
        (
            "grace-for-those-left-behind",
            "followers-of-a-leader-that-came-back-have-others-wait-for-those-left-behind",
        ),
        ("reset-is-no-death-to-a-follower", "a-reset-before-a-cut-is-no-death"),
        ("reset-is-no-death-to-a-leader", "a-reset-at-one-end-behind-a-cut-is-no-death"),
    ],
)
def test_scenario_makes_two_worlds_without_its_cure(cure: str, scenario: str) -> None:
    """What the scenario is there for comes back when the cure is taken out."""
    text = (SCENARIOS / f"{scenario}.txt").read_text()
    with undo_fix(cure), pytest.raises(AssertionError, match="Violation"):
        play(text)


def test_scenario_forgets_a_claimed_generation_without_its_cure() -> None:
    """Then only the generations that a forced quorum skips stand between the two worlds."""
    name = "a-claim-tells-of-generations-that-are-not-given-again"
    text = (SCENARIOS / f"{name}.txt").read_text()
    with undo_fix("claims-tell-generations"):
        assert "c  begins generation 1002 " in play(text)
