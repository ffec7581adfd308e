"""A job driven by the commands of a scenario, and what people would see of it.

The network and the disks have no chance: every packet and write takes half of its longest time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from elastic_resume.policy import wording
from elastic_resume.policy.failure_classification import Failure
from elastic_resume.rendezvous.core.interface import (
    EmitEvent,
    EndJob,
    EndMembership,
    RendezvousSettings,
    StartWorkers,
    StopWorkers,
)
from tests.support.rendezvous_sim.invariants import InvariantChecker
from tests.support.rendezvous_sim.network import SMALL_PATH_BYTES, Clock, Network
from tests.support.rendezvous_sim.simulated_node import SimulatedNode
from tests.support.rendezvous_sim.simulation import links_between, parse_links


class ConstantRandom(random.Random):
    """A random generator without chance: every packet and write takes half of its longest time."""

    def random(self) -> float:
        """Return one half."""
        return 0.5


class Scenario:
    """One job, driven by a scenario's commands."""

    def __init__(self, job: str) -> None:
        options = dict(word.partition("=")[::2] for word in job.split())
        min_nodes, max_nodes = options.get("nnodes", "1:9").split(":")
        settings = RendezvousSettings(
            tuple(options["candidates"].split(",")),
            int(min_nodes),
            int(max_nodes),
            join_timeout_s=float(options.get("join_timeout", 600)),
            heartbeats_per_timeout=int(
                options.get("heartbeats", RendezvousSettings(()).heartbeats_per_timeout)
            ),
            is_strict="strict" in options,
        )
        self.clock = Clock()
        self.net = Network(self.clock, ConstantRandom())
        self.checkers = InvariantChecker()
        self.nodes: dict[str, SimulatedNode] = {}
        self.lines: list[str] = []
        self.facts: list[tuple[float, str, object]] = []
        """What `lines` says, without words."""
        for place, name in enumerate(options["nodes"].split(",")):
            node_settings = settings
            if name == options.get("other_node_timeout"):
                node_settings = replace(settings, node_timeout_s=5.0)
            elif name == options.get("other_candidates"):
                node_settings = replace(settings, candidates=(*settings.candidates[:-1], name))
            node = self.nodes[name] = SimulatedNode(name, node_settings, self.net, self.checkers)
            node.node_name = name[0] if "same_names" in options else name  # b2 is another machine called b
            node.order = place if "node_order" in options else 0
            node.trace = self.record

    def record(self, name: str, item: object) -> None:
        """Add a line for each effect that people would notice."""
        if isinstance(item, StartWorkers):
            members = " ".join(map(str, item.members))
            text = f"starts generation {item.generation} as rank {item.rank} of {members}"
            text += f"; store {item.store_address}{format_causes(item.failures)}"
            text += f"; preparing: {' '.join(item.preparing_nodes)}" if item.preparing_nodes else ""
        elif isinstance(item, StopWorkers):
            verb = "kills" if item.immediately else "stops"
            text = f"{verb} generation {item.generation}: {wording.describe(item.reason)}"
        elif isinstance(item, EndJob):
            text = f"ends the job: {wording.describe(item.reason)}{format_causes(item.failures)}"
        elif isinstance(item, EndMembership):
            text = f"gives up: {wording.describe(item.reason)}"
        elif isinstance(item, EmitEvent):
            text = wording.describe_event(item.kind, item.reason, node=name, generation=item.generation)
            text = f"({item.kind}) {text}"
        else:
            return
        self.lines.append(f"{self.clock.now:7.2f}  {name}  {text}")
        self.facts.append((self.clock.now, name, item))

    def play(self, commands: str) -> None:
        """Run commands that semicolons separate."""
        for command in commands.split("; "):
            self.run_command(command)

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
            self.net.set_blocked_links(parse_links(words))
        elif verb == "drop-large-messages-to":
            self.net.limit_path(words[0], int(words[1]) if words[1:] else SMALL_PATH_BYTES)
        elif verb == "heal":
            self.net.set_blocked_links(set())
        elif verb == "reset":
            self.net.reset_connections(*words)
        elif verb == "reset-one-end":
            self.net.reset_connections(*words, both=False)
        elif verb == "delay":
            self.net.slow_delay_s[words[0]] = float(words[1])
        elif verb == "report-unreachable":  # the first node reports the others, or none any more
            self.nodes[words[0]].report_unreachable(tuple(words[1:]))
        elif verb == "digest":
            for word in words[1:]:
                name, _, state = word.partition("=")
                self.nodes[name].send_digest(int(words[0]), state)
        elif verb == "copy-directory":  # of the first node to the second, another machine
            self.nodes[words[1]].saved_state = self.nodes[words[0]].saved_state
        else:
            for name in words:
                self.run_node_command(verb, self.nodes[name])

    def run_until(self, is_reached: Callable[[], object], within_s: float = 10.0) -> None:
        """Run until a condition holds."""
        end_s = self.clock.now + within_s
        while not is_reached():
            assert self.clock.now < end_s, f"not within {within_s:g} s"
            self.clock.run_until(self.clock.now + 0.001)

    def run_node_command(self, verb: str, node: SimulatedNode) -> None:
        """Run one command for one node."""
        commands: dict[str, Callable[[], None]] = {
            "start": node.boot,
            "kill": node.die,
            "power-off": node.lose_power,
            "wipe-disk": lambda: setattr(node, "saved_state", None),
            "make-strict": lambda: setattr(node, "settings", replace(node.settings, is_strict=True)),
            "stall-disk": lambda: setattr(node, "max_write_s", 20.0),
            "hang-workers": lambda: setattr(node, "max_stop_s", 1e9),
            "kill-worker": node.fail_worker,
            "report-killed-worker": node.report_failure,
            "delay-join": lambda: setattr(node, "delays_join", True),
            "join": node.join_now,
            "abort-worker": lambda: node.fail_worker("SIGABRT"),
            "fail-job": node.fail_job,
            "pause": node.pause,
            "stop-clock": lambda: node.suspend(stops_clock=True),
            "resume": node.resume,
            "finish": node.finish,
            "leave": node.leave,
            "begin-preparation": node.begin_preparation,
            "finish-preparation": node.finish_preparation,
        }
        commands[verb]()


def format_causes(failures: tuple[Failure, ...]) -> str:
    """Format the failures that ended the last view."""
    texts = [wording.describe_failure(failure, with_node=True) for failure in failures]
    return f"; after: {'; '.join(texts)}" if texts else ""


def play(text: str) -> tuple[str, list[tuple[float, str, object]]]:
    """Run a scenario's commands; return it with what really happened, and the same without words."""
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
    assert not scenario.checkers.violations, scenario.checkers.violations
    return "\n".join(lines) + "\n", scenario.facts
