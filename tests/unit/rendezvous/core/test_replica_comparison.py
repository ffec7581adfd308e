"""The leader's comparison of replicas: what it keeps, and that it names the wrong nodes and no others."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from elastic_resume.policy.digests import Digest, DivergenceVerdict, is_digest_due
from elastic_resume.policy.restart import ReplicasDiffer
from elastic_resume.rendezvous.core.interface import RendezvousSettings, Send
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import Heartbeat, Message, ReplicasDiverged, StateDigest
from elastic_resume.rendezvous.core.peers import Link, Peer, PeerTable
from elastic_resume.rendezvous.core.replica_comparison import (
    MAJORITY_NODE_TIMEOUTS,
    MAX_STEPS_KEPT,
    DivergenceDetector,
)
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.world import Incarnation, View
from tests.support.rendezvous_sim.invariants import InvariantChecker
from tests.support.rendezvous_sim.network import Clock, Network
from tests.support.rendezvous_sim.simulated_node import SimulatedNode

ONE, OTHER = Digest("1" * 32), Digest("2" * 32)


class Setting:
    """A leader `a` and its followers in generation 7, and all messages sent to them."""

    def __init__(self, names: str = "abc") -> None:
        self.incarnations = {name: Incarnation(name, name) for name in names}
        members = tuple(self.incarnations.values())
        self.state = NodeState(RendezvousSettings(("a",)), members[0], None, 0.0)
        self.view = View(7, members, members[0])
        self.state.adopt_view(self.view)
        self.state.running_view = self.view
        peers = PeerTable()
        for number, name in enumerate(names[1:]):
            peers.add(Peer(self.incarnations[name], Link(-number - 1), running_generation=7))
        self.sent: list[tuple[str, Message]] = []
        self.detector = DivergenceDetector(
            self.state, peers, lambda peer, message: self.sent.append((peer.incarnation.node, message))
        )
        self.detector.handle_view_started(self.view)

    def add_digest(self, name: str, step: int, digest: Digest, generation: int = 7) -> None:
        """Deliver one member's heartbeat."""
        self.detector.add_digest(self.incarnations[name], StateDigest(generation, step, digest))

    def wait(self, node_timeouts: float) -> None:
        """Let time pass, and the leader decide."""
        self.state.now += node_timeouts * self.state.settings.node_timeout_s
        self.detector.advance()

    def find_report(self) -> ReplicasDiverged | None:
        """Return the report that all members got."""
        reports = {message for _, message in self.sent if isinstance(message, ReplicasDiverged)}
        reports |= {effect for effect in self.state.effects if isinstance(effect, ReplicasDiverged)}
        assert len(reports) <= 1
        return next(iter(reports), None)


def test_equal_digests_are_dropped_and_the_step_is_kept() -> None:
    """Late digests of earlier steps are dropped too."""
    setting = Setting()
    for name in "abc":
        setting.add_digest(name, 64, ONE)
    setting.add_digest("a", 32, OTHER)
    setting.add_digest("b", 32, ONE)
    assert (setting.detector.agreed_step, setting.detector.digests_by_step) == (64, {})
    assert setting.detector.diverged_since is None


def test_digests_of_other_generations_and_of_spares_are_ignored() -> None:
    """A digest may be ready late, and a spare's workers do not train."""
    setting = Setting()
    setting.add_digest("a", 64, ONE)
    setting.add_digest("b", 64, OTHER, generation=6)
    setting.detector.add_digest(Incarnation("spare", "spare"), StateDigest(7, 64, OTHER))
    setting.detector.add_digest(Incarnation("b", "b", 0), StateDigest(7, 64, OTHER))
    assert setting.detector.diverged_since is None
    setting.detector.reset()
    setting.add_digest("b", 64, OTHER)
    setting.detector.handle_view_started(View(8, setting.view.members, setting.view.leader))
    setting.add_digest("b", 64, OTHER)
    setting.add_digest("b", 64, OTHER, generation=8)
    assert setting.detector.diverged_since is None


def test_kept_steps_are_bounded() -> None:
    """One member sends step after step, and the others none."""
    setting = Setting()
    for step in range(1, 1000):
        setting.add_digest("b", step, ONE)
        assert len(setting.detector.digests_by_step) <= MAX_STEPS_KEPT
    setting.add_digest("c", 999, ONE)
    setting.add_digest("a", 999, ONE)
    assert setting.detector.agreed_step == 999


def has_reported(setting: Setting, step: int, groups: tuple[str, ...], diverged: str) -> bool:
    """Return whether all members got this report; each letter is a node."""
    verdict = DivergenceVerdict(step, 0, tuple(map(tuple, groups)), tuple(diverged))
    return setting.find_report() == ReplicasDiverged(7, verdict)


def test_wrong_node_is_reported_once_when_all_digests_are_here() -> None:
    """Later digests change nothing."""
    setting = Setting()
    setting.add_digest("a", 64, ONE)
    setting.add_digest("b", 64, OTHER)
    setting.wait(0)
    assert setting.find_report() is None
    setting.add_digest("c", 64, ONE)
    setting.wait(0)
    assert has_reported(setting, 64, ("ac", "b"), "b")
    assert isinstance(setting.state.job_failure, ReplicasDiffer)
    setting.sent.clear()
    setting.state.effects.clear()
    for name, digest in zip("abc", [ONE, OTHER, ONE], strict=True):
        setting.add_digest(name, 128, digest)
    setting.wait(99)
    assert setting.find_report() is None


def test_majority_waits_a_node_timeout_for_the_others() -> None:
    """A node without a digest is neither wrong nor right."""
    setting = Setting("abcde")
    for name, digest in zip("abcd", [ONE, OTHER, ONE, ONE], strict=True):
        setting.add_digest(name, 64, digest)
    setting.wait(0.9)
    assert setting.find_report() is None
    setting.wait(0.1)
    assert has_reported(setting, 64, ("acd", "b"), "b")


def test_two_halves_name_no_node_and_end_the_job() -> None:
    """It is unknown which half is wrong."""
    setting = Setting("abcd")
    for name, digest in zip("abcd", [ONE, OTHER, ONE, OTHER], strict=True):
        setting.add_digest(name, 64, digest)
    setting.wait(0)
    assert has_reported(setting, 64, ("ac", "bd"), "")


def test_majority_counts_all_members() -> None:
    """Two of five that agree are no majority, whatever the others would send."""
    setting = Setting("abcde")
    for name, digest in zip("abc", [ONE, ONE, OTHER], strict=True):
        setting.add_digest(name, 64, digest)
    setting.wait(1)
    assert setting.find_report() is None, "a later step may show a majority"
    setting.wait(MAJORITY_NODE_TIMEOUTS)
    assert has_reported(setting, 64, ("ab", "c"), "")


def test_leader_without_a_majority_waits_for_a_later_step() -> None:
    """The third node digests fewer steps; until then two that differ show no majority."""
    setting = Setting()
    for step in (96, 100, 128):
        setting.add_digest("a", step, ONE)
        setting.add_digest("b", step, OTHER)
        setting.wait(1)
        assert setting.find_report() is None
    setting.add_digest("c", 128, ONE)
    setting.wait(0)
    assert has_reported(setting, 128, ("ac", "b"), "b")


def test_leader_without_a_majority_ends_the_job_after_a_limit() -> None:
    """No node is named. Equal digests of later steps change nothing."""
    setting = Setting()
    setting.add_digest("a", 96, ONE)
    setting.add_digest("b", 96, OTHER)
    setting.wait(1)
    for step in range(128, 1000):
        for name in "abc":
            setting.add_digest(name, step, ONE)
        assert len(setting.detector.digests_by_step) <= MAX_STEPS_KEPT
    setting.wait(MAJORITY_NODE_TIMEOUTS)
    assert has_reported(setting, 96, ("a", "b"), "")


def test_queue_keeps_the_common_step_of_the_running_generation() -> None:
    """A digest of an earlier generation may be ready late."""
    state = Setting().state
    state.queue_digest(StateDigest(6, 64, ONE))
    assert state.take_digest() is None
    state.queue_digest(StateDigest(7, 64, ONE))
    state.queue_digest(StateDigest(7, 66, ONE))
    state.queue_digest(StateDigest(6, 128, ONE))
    assert state.take_digest() == StateDigest(7, 64, ONE)
    assert state.take_digest() is None
    state.queue_digest(StateDigest(7, 64, ONE))
    state.running_view = (
        View(8, state.running_view.members, state.incarnation) if state.running_view else None
    )
    state.queue_digest(StateDigest(8, 1, ONE))
    assert state.take_digest() == StateDigest(8, 1, ONE)


# Whole jobs.


class Job:
    """Nodes that train in step; each digests its own choice of steps, some time after each."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        count = rng.choice((2, 3, 3, 4, 5))
        self.names = "abcde"[:count]
        settings = RendezvousSettings(tuple(self.names), max_nodes=count, last_call_timeout_s=0.5)
        self.clock = Clock()
        self.clock.steps = -1_000_000
        net = self.net = Network(self.clock, rng)
        self.nodes = [SimulatedNode(name, settings, net, InvariantChecker()) for name in self.names]
        self.gaps = [1 << rng.randint(0, 4) for _ in self.names]
        self.lags_s = [rng.uniform(0, 0.5) for _ in self.names]
        self.sent: Counter[str] = Counter()
        for node in self.nodes:
            node.trace = self.count_sent
            node.boot()
        self.clock.run_until(5)
        assert all(node.running for node in self.nodes)

    def count_sent(self, name: str, item: object) -> None:
        """Count sent messages; digests go to the leader only."""
        if isinstance(item, Send):
            kind = type(item.message).__name__
            self.sent[kind] += 1
            if isinstance(item.message, Heartbeat) and item.message.state_digest:
                self.sent["digest"] += 1
                (agent,) = [node.agent for node in self.nodes if node.name == name]
                assert agent is not None
                assert not isinstance(agent.role, Leader)

    def train(self, steps: int, step_s: float, diverged_from: dict[str, int]) -> None:
        """Train; nodes in `diverged_from` have another state from that step on."""
        for step in range(1, steps + 1):
            self.clock.run_until(self.clock.now + step_s)
            for node, gap, lag_s in zip(self.nodes, self.gaps, self.lags_s, strict=True):
                if is_digest_due(step, gap):
                    differs = diverged_from.get(node.name, steps + 1) <= step
                    state = f"{step:06}" + ("x" if differs else "-") + "tail"
                    self.clock.call_at(self.clock.now + lag_s, self._digest, node, step, state)
            if self.rng.random() < 0.01:
                self.net.reset_connections(*self.rng.sample(self.names, 2))
        self.clock.run_until(self.clock.now + 6)

    def _digest(self, node: SimulatedNode, step: int, state: str) -> None:
        if node.running:
            node.send_digest(step, state)


@pytest.mark.parametrize("seed", range(12))
def test_equal_replicas_are_never_reported(seed: int) -> None:
    """With any gaps, lags and broken links. The newest step at which all were equal is known."""
    job = Job(seed)
    job.train(400, 0.05, {})
    assert job.sent["digest"] > 0
    assert not job.sent["ReplicasDiverged"] + job.sent["JobEnd"]
    (leader,) = [node.agent.role for node in job.nodes if node.agent and isinstance(node.agent.role, Leader)]
    assert leader.divergence.agreed_step >= 352, (
        "multiples of 16 in the last second of 400 steps may be missing"
    )
    assert len(leader.divergence.digests_by_step) <= MAX_STEPS_KEPT


@pytest.mark.parametrize("seed", range(16))
def test_diverged_replica_is_named_on_all_nodes(seed: int) -> None:
    """Within the steps that all nodes digest; with two nodes no node is named."""
    job = Job(seed)
    name = job.rng.choice(job.names)
    since = job.rng.randint(100, 200)
    job.train(400, 0.05, {name: since})
    node_timeout_steps = int(3 / 0.05)  # the wait for missing digests
    named = (name,) if len(job.names) > 2 else ()
    assert any(node.divergences for node in job.nodes)
    for node in job.nodes:
        if not node.divergences:  # its link broke at that time
            assert node.end
            assert isinstance(node.end.reason, ReplicasDiffer)
            continue
        report = node.divergences[0]
        verdict = report.verdict
        assert verdict.diverged == named
        assert verdict.agreed_step < since <= verdict.step < since + 48 + 2 * node_timeout_steps
    if report.generation == 1:
        assert job.sent["ReplicasDiverged"] <= len(job.names) - 1
