"""Test that own times reach the leader by heartbeat, and that all nodes learn which rank is slow."""

from __future__ import annotations

import pytest

from elastic_resume.mechanisms.mechanism import decode_body
from elastic_resume.mechanisms.slow_ranks.judge import MIN_COMPARISONS, OWN_TIMES, OwnTimes, SlowRank
from tests.support.rendezvous_sim.scenario import Scenario


class Job(Scenario):
    """Two members and a spare, whose agents send own times."""

    def compare(self, a_us: int, b_us: int, *, generation: int = 0, count: int = MIN_COMPARISONS) -> None:
        """Deliver the own times of both members so often."""
        for _ in range(count):
            for name, own_us in (("b", b_us), ("a", a_us)):
                running = self.find_generation()
                self.nodes[name].send_fact(OWN_TIMES.name, generation or running, OwnTimes((own_us,)))
            self.play("run 1")

    def find_generation(self) -> int:
        """Return the newest generation."""
        agent = self.nodes["a"].agent
        assert agent
        return agent.state.view.generation

    def named(self) -> dict[str, tuple[str, int] | None]:
        """Return the slow node and its own time, as each node knows it."""
        known = {
            name: node.agent.state.verdicts.get(OWN_TIMES.name)
            for name, node in self.nodes.items()
            if node.agent
        }
        slow = {name: decode_body(SlowRank, fact.body) if fact else None for name, fact in known.items()}
        return {name: (rank.node, rank.own_us) if rank else None for name, rank in slow.items()}


@pytest.fixture
def job() -> Job:
    """Start a view of a, which leads, and b."""
    started = Job("nodes=a,b,s candidates=a nnodes=1:2")
    started.play("start a b; run 5; start s; run 2")
    return started


def test_slow_rank_is_known_to_all_nodes_until_it_is_slow_no_more(job: Job) -> None:
    """A follower's times take part too; the numbers are the newest."""
    job.compare(20_000, 80_000)
    job.compare(20_000, 81_000, count=2)
    assert job.named() == dict.fromkeys("abs", ("b", 81_000))
    job.compare(20_000, 20_000, count=2)
    assert job.named() == dict.fromkeys("abs")


def test_own_times_of_another_generation_name_nobody(job: Job) -> None:
    """They are late, or of workers that resumed nothing of this view."""
    job.compare(20_000, 80_000, generation=job.find_generation() + 1)
    assert job.named() == dict.fromkeys("abs")


def test_rank_is_not_named_in_the_next_generation(job: Job) -> None:
    """Own times begin anew with each view."""
    job.compare(20_000, 80_000)
    before = job.find_generation()
    job.play("kill b; run 5; start b; run 5")
    assert job.find_generation() > before
    job.compare(20_000, 80_000, count=1)
    assert job.named()["a"] is None
