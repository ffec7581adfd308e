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
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.net.status import build_status
from tests.support.rendezvous_sim.net import Clock
from tests.support.rendezvous_sim.node import SimulatedNode

POLL_INTERVAL_S = (0.3, 3.0)
"""Between two looks at the job."""
MAX_COMMAND_DELAY_S = 2.0
"""The word takes so long at most, and nobody starts an agent on a node that was declared dead sooner."""


class Operator:
    """The operator of one job."""

    def __init__(self, nodes: Mapping[str, SimulatedNode], clock: Clock, rng: random.Random) -> None:
        self.nodes = nodes
        self.clock = clock
        self.rng = rng

    def start(self) -> None:
        """Look again and again."""
        self.clock.call_at(self.clock.now + self.rng.uniform(*POLL_INTERVAL_S), self._poll)

    def allow_restarts(self) -> None:
        """The network is whole: who was declared dead may come back."""
        for node in self.nodes.values():
            if node.declared_dead:
                self.clock.call_at(self.clock.now + MAX_COMMAND_DELAY_S, self._restart_node, node)

    @staticmethod
    def _restart_node(node: SimulatedNode) -> None:
        node.declared_dead = False
        node.boot()

    def _poll(self) -> None:
        for node in self.nodes.values():
            agent = None if node.is_paused else node.agent
            if agent and isinstance(agent.role, Leader) and build_status(agent).missing:
                self._force_quorum(agent, {node.name, *agent.role.peers.by_node})
        self.start()

    def _force_quorum(self, leader: RendezvousNode, present: set[str]) -> None:
        """Tell any of those that are here; it tells its leader."""
        others = [one for one in self.nodes.values() if one.name not in present]
        if any(one.has_process for one in others):
            return
        for other in others:
            other.declared_dead = other.incarnation_id > 0
        told = self.nodes[self.rng.choice(sorted(present))]
        force = ForceQuorum(leader.state.quorum_state.newest_generation)
        self.clock.call_at(
            self.clock.now + self.rng.random() * MAX_COMMAND_DELAY_S,
            told.deliver_event,
            force,
            told.incarnation_id,
        )
