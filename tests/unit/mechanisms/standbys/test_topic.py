"""Test that every node learns from the leader what the job's workers need to start."""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import decode_body
from elastic_resume.mechanisms.standbys.judge import START_COST, StartCost
from tests.support.rendezvous_sim.scenario import Scenario

COST, LATER_COST = StartCost(20.0, 1 << 30), StartCost(30.0, 1 << 30)


def test_start_cost_reaches_spares_newcomers_and_the_followers_of_the_next_leader() -> None:
    """A spare that follows already learns it too; a new leader knows what the last one has told it."""
    job = Scenario("nodes=a,b,c,s candidates=a,b nnodes=1:2")

    def known() -> dict[str, StartCost | None]:
        verdicts = {
            name: node.agent.state.verdicts.get(START_COST.name)
            for name, node in job.nodes.items()
            if node.agent
        }
        return {name: decode_body(StartCost, fact.body) if fact else None for name, fact in verdicts.items()}

    job.play("start a b s; run 5")
    assert known() == dict.fromkeys("abs")
    job.nodes["a"].send_fact(START_COST.name, 0, COST)
    job.play("run 1")
    assert known() == dict.fromkeys("abs", COST)
    job.play("kill a; run 2; start c; run 2")
    assert known() == dict.fromkeys("bcs", COST)
    job.nodes["b"].send_fact(START_COST.name, 0, LATER_COST)
    job.play("run 1")
    assert known() == dict.fromkeys("bcs", LATER_COST)
