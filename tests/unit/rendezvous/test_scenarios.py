"""Play scenario files against the rendezvous core and compare what happens with what the file says.

A file's name is the sentence that it proves. `>` lines are commands to `Scenario.run_command`, `#` lines are
comments, and the rest is what people would see until the next command: time, node, text. With
ELASTIC_RESUME_REWRITE=1 the test rewrites the files: read the diff.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.policy.divergence import RESUME_FROM_MAJORITY, summarize_divergence
from elastic_resume.policy.failure_classification import Failure, describe_failure
from elastic_resume.rendezvous.core.events import (
    EmitEvent,
    EndJob,
    GiveUp,
    Settings,
    StartWorkers,
    StopWorkers,
)
from elastic_resume.rendezvous.core.messages import (
    EndView,
    ForceQuorumRequest,
    ProposeView,
    ReplicasDiverged,
    Welcome,
)
from tests.support.paths import SCENARIOS
from tests.support.rendezvous_sim.invariants import InvariantChecker
from tests.support.rendezvous_sim.mutations import apply_mutation
from tests.support.rendezvous_sim.network import Clock, ConnectionEnd, Network
from tests.support.rendezvous_sim.simulated_node import SimulatedNode
from tests.support.rendezvous_sim.simulation import links_between

FILES = sorted(SCENARIOS.glob("*.txt"))
REWRITE = os.environ.get("ELASTIC_RESUME_REWRITE") == "1"


class ConstantRandom(random.Random):
    """A random generator without chance: every packet and write takes half of its longest time."""

    def random(self) -> float:
        """Return one half."""
        return 0.5


class Scenario:
    """One job, driven by a scenario's commands."""

    def __init__(self, job: str) -> None:
        options = dict(word.split("=") for word in job.split())
        min_nodes, max_nodes = options.get("nnodes", "1:9").split(":")
        settings = Settings(
            tuple(options["candidates"].split(",")),
            int(min_nodes),
            int(max_nodes),
            join_timeout_s=float(options.get("join_timeout", 600)),
            heartbeats_per_timeout=int(options.get("heartbeats", Settings(()).heartbeats_per_timeout)),
            resume_from_majority=options.get("on_divergence") == RESUME_FROM_MAJORITY,
        )
        self.clock = Clock()
        self.net = Network(self.clock, ConstantRandom())
        self.checkers = InvariantChecker()
        self.nodes: dict[str, SimulatedNode] = {}
        self.lines: list[str] = []
        for place, name in enumerate(options["nodes"].split(",")):
            other = name == options.get("other_node_timeout")
            node_settings = replace(settings, node_timeout_s=5.0) if other else settings
            node = self.nodes[name] = SimulatedNode(name, node_settings, self.net, self.checkers)
            node.order = place if "scheduler_order" in options else 0
            node.trace = self.record

    def record(self, name: str, item: object) -> None:
        """Add a line for each effect that people would notice."""
        if isinstance(item, StartWorkers):
            members = " ".join(map(str, item.members))
            text = f"starts generation {item.generation} as rank {item.rank} of {members}"
            text += f"; store {item.store_address}{format_causes(item.failures)}"
        elif isinstance(item, StopWorkers):
            verb = "kills" if item.immediately else "stops"
            text = f"{verb} generation {item.generation}: {item.reason}"
        elif isinstance(item, ReplicasDiverged):
            verdict = item.verdict
            text = f"reports: {summarize_divergence(verdict)}; last equal at step {verdict.agreed_step}"
        elif isinstance(item, EndJob):
            text = f"ends the job: {item.reason}{format_causes(item.failures)}"
        elif isinstance(item, GiveUp):
            text = f"gives up: {item.reason}"
        elif isinstance(item, EmitEvent):
            text = f"({item.kind}) {item.text}"
        else:
            return
        self.lines.append(f"{self.clock.now:7.2f}  {name}  {text}")

    def run_command(self, command: str) -> None:
        """Run one command."""
        verb, *words = command.split()
        if verb == "run":
            self.clock.run_until(self.clock.now + float(words[0]))
        elif verb == "partition":
            groups = [group.split() for group in " ".join(words).split("|")]
            names = [name for group in groups for name in group]
            self.net.set_blocked_links(links_between(groups, names))
        elif verb == "drop-messages":  # from the first node to the others
            self.net.set_blocked_links({(words[0], target) for target in words[1:]})
        elif verb == "block-links":
            self.net.set_blocked_links({link for word in words for link in parse_link(word)})
        elif verb == "drop-large-messages-to":
            self.drop_large_messages_to(words[0])
        elif verb == "heal":
            self.net.set_blocked_links(set())
        elif verb == "reset":
            self.net.reset_connections(*words)
        elif verb == "reset-one-end":
            self.net.reset_connections(*words, both=False)
        elif verb == "delay":
            self.net.slow_delay_s[words[0]] = float(words[1])
        elif verb == "digest":
            for word in words[1:]:
                name, _, state = word.partition("=")
                self.nodes[name].send_digest(int(words[0]), state)
        elif verb == "force-quorum":
            node = self.nodes[words[0]]
            node.deliver_event(ForceQuorumRequest(int(words[1])), node.incarnation_id)
        else:
            for name in words:
                self.run_node_command(verb, self.nodes[name])

    def drop_large_messages_to(self, name: str) -> None:
        """Drop all but small messages to a node, as a path does that drops large packets."""
        send = self.net.send

        def send_small(end: ConnectionEnd, payload: Any) -> None:
            large = isinstance(payload[1], (Welcome, ProposeView, EndView))
            if not (large and end.peer and end.peer.host == name):
                send(end, payload)

        self.net.send = send_small  # type: ignore[method-assign]

    def run_node_command(self, verb: str, node: SimulatedNode) -> None:
        """Run one command for one node."""
        commands: dict[str, Callable[[], None]] = {
            "start": node.boot,
            "kill": node.die,
            "power-off": node.lose_power,
            "wipe-disk": lambda: setattr(node, "saved_state", None),
            "stall-disk": lambda: setattr(node, "max_write_s", 20.0),
            "kill-worker": node.fail_worker,
            "abort-worker": lambda: node.fail_worker("was killed by SIGABRT"),
            "fail-job": lambda: node.fail_job(f"node {node.name} gave up"),
            "pause": node.pause,
            "resume": node.resume,
            "finish": node.finish,
            "leave": node.leave,
            "begin-imports": lambda: setattr(node, "is_importing", True),
            "finish-imports": node.finish_imports,
        }
        commands[verb]()


def format_causes(failures: tuple[Failure, ...]) -> str:
    """Format the failures that ended the last view."""
    texts = [describe_failure(failure, with_node=True) for failure in failures]
    return f"; after: {'; '.join(texts)}" if texts else ""


def parse_link(link: str) -> set[tuple[str, str]]:
    """Parse `a-b`, both directions between two nodes, or `a>b`, one direction."""
    first, second = link[0], link[-1]
    return {(first, second)} if link[1] == ">" else {(first, second), (second, first)}


def play(text: str) -> str:
    """Run a scenario's commands and return it with what really happened."""
    scenario: Scenario | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            lines.append(line)
        elif line.startswith("> job"):
            scenario = Scenario(line.removeprefix("> job"))
            lines.append(line)
        elif line.startswith("> ") and scenario:
            scenario.lines = []
            scenario.run_command(line[2:])
            lines += [line, *scenario.lines]
    assert scenario is not None, "a scenario begins with '> job'"
    assert not scenario.checkers.violations or "> force-quorum" in text, scenario.checkers.violations
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_scenario(path: Path) -> None:
    """The core does what the file says."""
    text = path.read_text()
    result = play(text)
    if REWRITE:
        path.write_text(result)
    assert result == text or REWRITE


@pytest.mark.parametrize(
    ("mutation", "scenario"),
    [
        ("spares-prove-deaths", "a-spare-that-reads-a-leave-notice-late-proves-no-deaths"),
        ("no-grace-after-leaving", "a-leader-that-steps-down-makes-the-other-wait-for-leases-it-granted"),
        ("no-grace-after-leaving", "followers-of-a-restarted-leader-make-others-wait-for-its-leases"),
        ("reset-kills-leader", "a-reset-before-a-partition-proves-no-death"),
        ("reset-kills-follower", "a-reset-at-one-end-proves-no-death"),
    ],
)
def test_scenario_with_mutation_forms_two_views(mutation: str, scenario: str) -> None:
    """Each scenario exists for one bug fix; without the fix the bug is back."""
    text = (SCENARIOS / f"{scenario}.txt").read_text()
    with apply_mutation(mutation), pytest.raises(AssertionError, match="Violation"):
        play(text)


def test_scenario_with_mutation_forgets_an_announced_generation() -> None:
    """Without the fix only the gap of a forced quorum separates the generations."""
    text = (SCENARIOS / "a-generation-that-a-leader-announced-is-never-reused.txt").read_text()
    with apply_mutation("announcements-ignored"):
        assert "c  starts generation 1002 " in play(text)
