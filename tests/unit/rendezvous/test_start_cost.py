"""Test that every node learns from the leader what the job's workers need to start."""

from __future__ import annotations

from elastic_resume.policy.start_cost import StartCost
from tests.support.rendezvous_sim.scenario import Scenario

COST, LATER_COST = StartCost(20.0, 1 << 30), StartCost(30.0, 1 << 30)


def test_start_cost_reaches_spares_newcomers_and_the_followers_of_the_next_leader() -> None:
    """A spare that follows already learns it too; a new leader knows what the last one has told it."""
    job = Scenario("nodes=a,b,c,s candidates=a,b nnodes=1:2")

    def known() -> dict[str, StartCost | None]:
        return {name: node.agent.state.start_cost for name, node in job.nodes.items() if node.agent}

    job.play("start a b s; run 5")
    assert known() == dict.fromkeys("abs")
    job.nodes["a"].deliver_event(COST, job.nodes["a"].incarnation_id)
    job.play("run 1")
    assert known() == dict.fromkeys("abs", COST)
    job.play("kill a; run 2; start c; run 2")
    assert known() == dict.fromkeys("bcs", COST)
    job.nodes["b"].deliver_event(LATER_COST, job.nodes["b"].incarnation_id)
    job.play("run 1")
    assert known() == dict.fromkeys("bcs", LATER_COST)
