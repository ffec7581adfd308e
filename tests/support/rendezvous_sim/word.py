"""An operator who forces the quorum of simulated nodes, at random moments, and whose word arrives late.

The operator forces it only where every other node is dead, and keeps the dead away until the network is
whole: "dead for good". (Nodes that ran on behind a cut, were declared dead, and came back behind it with
their disks would go on.)
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from elastic_resume.rendezvous.core.events import ForceQuorum
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.node import Agent
from elastic_resume.rendezvous.status_view import look
from tests.support.rendezvous_sim.net import Clock
from tests.support.rendezvous_sim.node import Node

LOOKS_S = (0.3, 3.0)
"""Between two looks at the job."""
LATE_S = 2.0
"""The word takes so long at most, and nobody starts an agent on a node that was declared dead sooner."""


class Operator:
    """The operator of one job."""

    def __init__(self, nodes: Mapping[str, Node], clock: Clock, rng: random.Random) -> None:
        self.nodes = nodes
        self.clock = clock
        self.rng = rng

    def start(self) -> None:
        """Look again and again."""
        self.clock.at(self.clock.now + self.rng.uniform(*LOOKS_S), self._look)

    def release(self) -> None:
        """The network is whole: who was declared dead may come back."""
        for node in self.nodes.values():
            if node.buried:
                self.clock.at(self.clock.now + LATE_S, self._bring_back, node)

    @staticmethod
    def _bring_back(node: Node) -> None:
        node.buried = False
        node.boot()

    def _look(self) -> None:
        for node in self.nodes.values():
            agent = None if node.paused else node.agent
            if agent and isinstance(agent.role, Leader) and look(agent).missing:
                self._force(agent, {node.name, *agent.role.roster.nodes})
        self.start()

    def _force(self, agent: Agent, here: set[str]) -> None:
        """Tell any of those that are here; it tells its leader."""
        others = [one for one in self.nodes.values() if one.name not in here]
        if any(one.process for one in others):
            return
        for other in others:
            other.buried = other.life > 0
        told = self.nodes[self.rng.choice(sorted(here))]
        force = ForceQuorum(agent.body.known.generation)
        self.clock.at(self.clock.now + self.rng.random() * LATE_S, told.hear, force, told.life)
