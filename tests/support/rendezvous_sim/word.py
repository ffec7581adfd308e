"""A scheduler that knows which simulated nodes are dead, and tells those who ask, at random moments and late.

It tells the truth. When it has said that nobody else is left, the dead stay away until the network is whole:
Slurm takes a lost node out of the job for good, a deleted pod comes back as another one without a disk.
(Nodes that ran on behind a cut, were declared dead, and came back behind it with their disks would go on.)
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from elastic_resume.rendezvous.quorum import Incarnation, Question
from elastic_resume.rendezvous.steps import SchedulerSays
from tests.support.rendezvous_sim.net import Clock
from tests.support.rendezvous_sim.node import Node

ASKED_S = (0.3, 3.0)
"""Between two questions."""
LATE_S = 2.0
"""An answer takes so long at most, and nobody starts an agent on a node that was declared dead sooner."""


class Scheduler:
    """The scheduler of one job."""

    def __init__(self, nodes: Mapping[str, Node], clock: Clock, rng: random.Random) -> None:
        self.nodes = nodes
        self.clock = clock
        self.rng = rng

    def start(self) -> None:
        """Be there to be asked."""
        self.clock.at(self.clock.now + self.rng.uniform(*ASKED_S), self._be_asked)

    def release(self) -> None:
        """The network is whole: who was declared dead may come back."""
        for node in self.nodes.values():
            if node.buried:
                self.clock.at(self.clock.now + LATE_S, self._bring_back, node)

    @staticmethod
    def _bring_back(node: Node) -> None:
        node.buried = False
        node.boot()

    def _be_asked(self) -> None:
        for node in self.nodes.values():
            question = node.agent.question if node.agent and not node.paused else None
            if question:
                self._answer(node, question)
        self.start()

    def _answer(self, node: Node, question: Question) -> None:
        here = {one.node for one in question.here}
        others = [one for one in self.nodes.values() if one.name not in here]
        dead = frozenset(one for one in question.missing if not self._lives(one))
        alone = not any(one.process for one in others)
        if alone:
            for other in others:
                other.buried = other.life > 0
        says = SchedulerSays(question, dead, alone)
        self.clock.at(self.clock.now + self.rng.random() * LATE_S, node.hear, says, node.life)

    def _lives(self, who: Incarnation) -> bool:
        node = self.nodes[who.node]
        return node.process and str(node.life) == who.life.partition("+")[0]
