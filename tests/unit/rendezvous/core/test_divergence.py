"""The leader's comparison: what it remembers, and that it finds whoever is wrong, and only those."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from elastic_resume.policy.divergence import Digest, DivergenceVerdict, is_digest_due
from elastic_resume.rendezvous.core.divergence import (
    MAJORITY_NODE_TIMEOUTS,
    MAX_STEPS_KEPT,
    DivergenceDetector,
)
from elastic_resume.rendezvous.core.events import ReportDivergence, Send, Settings
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import Heartbeat, Message, ReplicasDiverged, StateDigest
from elastic_resume.rendezvous.core.peers import Link, Peer, PeerTable
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.core.state import NodeState
from tests.support.rendezvous_sim.checkers import InvariantChecker
from tests.support.rendezvous_sim.net import Clock, Network
from tests.support.rendezvous_sim.node import SimulatedNode

ONE, OTHER = Digest("1" * 32), Digest("2" * 32)


class Table:
    """A leader `a` and its followers in generation 7, and all that is said to them."""

    def __init__(self, names: str = "abc", *, on: str = "stop") -> None:
        self.who = {name: Incarnation(name, "1") for name in names}
        members = tuple(self.who.values())
        self.body = NodeState(Settings(("a",), resume_from_majority=on != "stop"), members[0], None, 0.0)
        self.world = View(7, members, members[0])
        self.body.quorum_state = QuorumState(1, self.world)
        self.body.running_view = self.world
        roster = PeerTable()
        for number, name in enumerate(names[1:]):
            roster.add(Peer(self.who[name], Link(-number - 1), running_generation=7))
        self.said: list[tuple[str, Message]] = []
        self.comparer = DivergenceDetector(
            self.body, roster, lambda part, it: self.said.append((part.incarnation.node, it))
        )
        self.comparer.handle_view_installed(self.world)

    def tell(self, name: str, step: int, digest: Digest, generation: int = 7) -> None:
        """One member's heartbeat."""
        self.comparer.add_digest(self.who[name], StateDigest(generation, step, digest))

    def wait(self, node_timeouts: float) -> str:
        """Let time pass; why the world is to restart."""
        self.body.now += node_timeouts * self.body.settings.node_timeout_s
        return self.comparer.advance()

    def found(self) -> ReplicasDiverged | None:
        """What all were told."""
        told = {message for _, message in self.said if isinstance(message, ReplicasDiverged)}
        told |= {effect.divergence for effect in self.body.effects if isinstance(effect, ReportDivergence)}
        assert len(told) <= 1
        return next(iter(told), None)


def test_equal_prints_are_forgotten_and_the_step_is_remembered() -> None:
    """Late ones of earlier steps too."""
    table = Table()
    for name in "abc":
        table.tell(name, 64, ONE)
    table.tell("a", 32, OTHER)
    table.tell("b", 32, ONE)
    assert (table.comparer.agreed_step, table.comparer.digests_by_step) == (64, {})
    assert table.comparer.diverged_since is None


def test_only_prints_of_members_of_the_running_generation_are_compared() -> None:
    """A digest may be ready late, and a spare's workers do not train."""
    table = Table()
    table.tell("a", 64, ONE)
    table.tell("b", 64, OTHER, generation=6)
    table.comparer.add_digest(Incarnation("spare", "1"), StateDigest(7, 64, OTHER))
    table.comparer.add_digest(Incarnation("b", "0"), StateDigest(7, 64, OTHER))
    assert table.comparer.diverged_since is None
    table.comparer.reset()
    table.tell("b", 64, OTHER)
    table.comparer.handle_view_installed(View(8, table.world.members, table.world.leader))
    table.tell("b", 64, OTHER)
    table.tell("b", 64, OTHER, generation=8)
    assert table.comparer.diverged_since is None


def test_what_is_remembered_is_bounded() -> None:
    """One member that tells of step after step, and others that tell of none."""
    table = Table()
    for step in range(1, 1000):
        table.tell("b", step, ONE)
        assert len(table.comparer.digests_by_step) <= MAX_STEPS_KEPT
    table.tell("c", 999, ONE)
    table.tell("a", 999, ONE)
    assert table.comparer.agreed_step == 999


def judged(table: Table, step: int, camps: tuple[str, ...], wrong: str, *, goes_on: bool) -> bool:
    """Whether that is what all were told; each letter is a node."""
    verdict = DivergenceVerdict(step, table.comparer.agreed_step, tuple(map(tuple, camps)), tuple(wrong))
    return table.found() == ReplicasDiverged(7, verdict, goes_on)


def test_who_is_wrong_is_named_when_all_have_told() -> None:
    """At once, and once."""
    table = Table()
    table.tell("a", 64, ONE)
    table.tell("b", 64, OTHER)
    assert not table.wait(0)
    assert table.found() is None
    table.tell("c", 64, ONE)
    assert not table.wait(0)
    assert judged(table, 64, ("ac", "b"), "b", goes_on=False)
    assert table.body.job_failure.startswith("replicas differ at step 64: node b is not as nodes a and c")
    table.said.clear()
    table.body.effects.clear()
    for name, digest in zip("abc", [ONE, OTHER, ONE], strict=True):
        table.tell(name, 128, digest)
    assert not table.wait(99)
    assert table.found() is None


def test_a_majority_does_not_wait_longer_than_a_node_timeout_for_the_others() -> None:
    """Who tells nothing is neither wrong nor right."""
    table = Table("abcde", on="resume-from-majority")
    for name, digest in zip("abcd", [ONE, OTHER, ONE, ONE], strict=True):
        table.tell(name, 64, digest)
    assert not table.wait(0.9)
    said = "replicas differ at step 64: node b is not as nodes a, c and d, the majority"
    assert table.wait(0.1) == said
    assert judged(table, 64, ("acd", "b"), "b", goes_on=True)
    assert not table.body.job_failure


@pytest.mark.parametrize("on", ["stop", "resume-from-majority"])
def test_of_two_halves_nobody_is_named_and_the_job_ends(on: str) -> None:
    """By either policy."""
    table = Table("abcd", on=on)
    for name, digest in zip("abcd", [ONE, OTHER, ONE, OTHER], strict=True):
        table.tell(name, 64, digest)
    assert not table.wait(0)
    assert judged(table, 64, ("ac", "bd"), "", goes_on=False)
    assert "no majority" in table.body.job_failure


def test_who_tells_nothing_is_no_part_of_a_majority() -> None:
    """Two of five that agree are fewer than the three that did not tell, or otherwise."""
    table = Table("abcde", on="resume-from-majority")
    for name, digest in zip("abc", [ONE, ONE, OTHER], strict=True):
        table.tell(name, 64, digest)
    assert not table.wait(1)
    assert table.found() is None, "a later step may tell more"
    assert not table.wait(MAJORITY_NODE_TIMEOUTS)
    assert judged(table, 64, ("ab", "c"), "", goes_on=False)


def test_a_leader_in_doubt_waits_for_a_step_that_more_tell_of() -> None:
    """The third node digests more seldom; until it tells, the two that differ name nobody."""
    table = Table(on="resume-from-majority")
    for step in (96, 100, 128):
        table.tell("a", step, ONE)
        table.tell("b", step, OTHER)
        assert not table.wait(1)
    table.tell("c", 128, ONE)
    assert table.wait(0)
    assert judged(table, 128, ("ac", "b"), "b", goes_on=True)


def test_a_doubt_comes_to_an_end() -> None:
    """Nobody is named then, and by either policy the job ends; that all were equal later excuses nothing."""
    table = Table(on="resume-from-majority")
    table.tell("a", 96, ONE)
    table.tell("b", 96, OTHER)
    assert not table.wait(1)
    for step in range(128, 1000):
        for name in "abc":
            table.tell(name, step, ONE)
        assert len(table.comparer.digests_by_step) <= MAX_STEPS_KEPT
    assert not table.wait(MAJORITY_NODE_TIMEOUTS)
    assert judged(table, 96, ("a", "b"), "", goes_on=False)
    assert "no majority" in table.body.job_failure
    assert not table.wait(0)


def test_who_is_back_hears_of_it_if_it_is_wrong() -> None:
    """Its link may have broken over it."""
    table = Table(on="resume-from-majority")
    for name, digest in zip("abc", [ONE, OTHER, ONE], strict=True):
        table.tell(name, 64, digest)
    assert table.wait(0)
    table.comparer.reset()
    table.said.clear()
    for part in table.comparer.peers:
        table.comparer.resend_divergence(part)
    assert [name for name, _ in table.said] == ["b"]


def test_a_digest_of_an_earlier_world_is_not_told_of_a_later_one() -> None:
    """It may be ready late. Of one generation the rounder step is told, of two the later one."""
    body = Table().body
    body.queue_digest(StateDigest(6, 64, ONE))
    assert body.take_digest() is None
    body.queue_digest(StateDigest(7, 64, ONE))
    body.queue_digest(StateDigest(7, 66, ONE))
    body.queue_digest(StateDigest(6, 128, ONE))
    assert body.take_digest() == StateDigest(7, 64, ONE)
    assert body.take_digest() is None
    body.queue_digest(StateDigest(7, 64, ONE))
    body.running_view = View(8, body.running_view.members, body.incarnation) if body.running_view else None
    body.queue_digest(StateDigest(8, 1, ONE))
    assert body.take_digest() == StateDigest(8, 1, ONE)


# ---- whole jobs ----------------------------------------------------------------------------------------


class Job:
    """Nodes that train in step and digest by budgets of their own, some time after each step."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        count = rng.choice((2, 3, 3, 4, 5))
        self.names = "abcde"[:count]
        self.on = rng.random() < 0.5
        settings = Settings(tuple(self.names), max_nodes=count, last_call_s=0.5, resume_from_majority=self.on)
        self.clock = Clock()
        self.clock.steps = -1_000_000
        net = self.net = Network(self.clock, rng)
        self.nodes = [SimulatedNode(name, settings, net, InvariantChecker()) for name in self.names]
        self.gaps = [1 << rng.randint(0, 4) for _ in self.names]
        self.lags_s = [rng.uniform(0, 0.5) for _ in self.names]
        self.sent: Counter[str] = Counter()
        for node in self.nodes:
            node.trace = self.see
            node.boot()
        self.clock.run_until(5)
        assert all(node.running for node in self.nodes)

    def see(self, name: str, what: object) -> None:
        """Count what is sent; prints go to the leader only."""
        if isinstance(what, Send):
            kind = type(what.message).__name__
            self.sent[kind] += 1
            if isinstance(what.message, Heartbeat) and what.message.state_digest:
                self.sent["print"] += 1
                assert not isinstance(next(one for one in self.nodes if one.name == name).agent.role, Leader)  # type: ignore[union-attr]

    def train(self, steps: int, step_s: float, wrong: dict[str, int]) -> None:
        """Train; a node in `wrong` holds something else from that step on."""
        for step in range(1, steps + 1):
            self.clock.run_until(self.clock.now + step_s)
            for node, gap, lag_s in zip(self.nodes, self.gaps, self.lags_s, strict=True):
                if is_digest_due(step, gap):
                    differs = wrong.get(node.name, steps + 1) <= step
                    state = f"{step:06}" + ("x" if differs else "-") + "tail"
                    self.clock.call_at(self.clock.now + lag_s, self._digest, node, step, state)
            if self.rng.random() < 0.01:
                one, other = self.rng.sample(self.names, 2)
                self.net.reset_connections(one, other)
        self.clock.run_until(self.clock.now + 6)

    def _digest(self, node: SimulatedNode, step: int, state: str) -> None:
        if node.running:
            node.send_digest(step, state)


@pytest.mark.parametrize("seed", range(12))
def test_replicas_that_are_equal_are_never_said_to_differ(seed: int) -> None:
    """Whatever the budgets, lags and broken links; and the newest step at which all were equal is known."""
    job = Job(seed)
    job.train(400, 0.05, {})
    assert job.sent["print"] > 0
    assert not job.sent["ReplicasDiverged"] + job.sent["JobEnd"]
    (leader,) = [node.agent.role for node in job.nodes if node.agent and isinstance(node.agent.role, Leader)]
    assert leader.divergence.agreed_step >= 352, (
        "of 400 steps, the multiples of 16 that fell into the last second"
    )
    assert len(leader.divergence.digests_by_step) <= MAX_STEPS_KEPT


@pytest.mark.parametrize("seed", range(16))
def test_one_replica_that_differs_is_named_on_all_nodes(seed: int) -> None:
    """Within the steps that all nodes tell of; with two nodes nobody is named."""
    job = Job(seed)
    name = job.rng.choice(job.names)
    since = job.rng.randint(100, 200)
    job.train(400, 0.05, {name: since})
    node_timeout_steps = int(3 / 0.05)  # to wait for those who tell nothing
    named = (name,) if len(job.names) > 2 else ()
    assert any(node.divergences for node in job.nodes)
    for node in job.nodes:
        if not node.divergences:  # its link broke in that moment
            assert "EndJob: replicas differ" in node.end_text
            continue
        told = node.divergences[0]
        verdict = told.verdict
        assert verdict.diverged == named
        assert verdict.agreed_step < since <= verdict.step < since + 48 + 2 * node_timeout_steps
        assert told.continues_from_majority == (bool(named) and job.on)
    if not told.continues_from_majority and told.generation == 1:
        assert job.sent["ReplicasDiverged"] <= len(job.names) - 1
