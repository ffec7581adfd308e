"""The leader's comparison of replicas: what it keeps, and that it names the wrong nodes and no others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from elastic_resume.mechanisms.mechanism import decode_body, encode_body
from elastic_resume.mechanisms.replicas.description import DivergenceVerdict
from elastic_resume.mechanisms.replicas.judge import (
    DIGESTS,
    MAJORITY_NODE_TIMEOUTS,
    MAX_STEPS_KEPT,
    ReplicaComparison,
    StateDigest,
    is_digest_due,
)
from elastic_resume.policy.restart import JudgedFailure
from elastic_resume.rendezvous.core.interface import RendezvousSettings, Send
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import Heartbeat
from elastic_resume.rendezvous.facts import Fact, FactBody, FactOutbox, Scope
from tests.support.rendezvous_sim.invariants import InvariantChecker
from tests.support.rendezvous_sim.network import Clock, Network
from tests.support.rendezvous_sim.scenario import Scenario
from tests.support.rendezvous_sim.simulated_node import SimulatedNode

ONE, OTHER = "1" * 32, "2" * 32


class Setting:
    """A comparison of members `a`, `b`, … in generation 7."""

    def __init__(self, names: str = "abc") -> None:
        self.now = 0.0
        self.comparison = ReplicaComparison(Scope(7, tuple(names), "a", 1.0))

    def add_digests(self, step: int, names: str, digests: Sequence[str]) -> None:
        """Deliver one heartbeat of each of these members."""
        for name, digest in zip(names, digests, strict=True):
            self.comparison.add(name, make_fact(7, step, digest), self.now)

    def wait(self, node_timeouts: float) -> DivergenceVerdict | None:
        """Let time pass, and return the verdict."""
        self.now += node_timeouts
        return self.comparison.find_difference(self.now)


def test_equal_digests_are_dropped_and_the_step_is_kept() -> None:
    """Late digests of earlier steps are dropped too."""
    setting = Setting()
    setting.add_digests(64, "abc", [ONE] * 3)
    setting.add_digests(32, "ab", [OTHER, ONE])
    assert (setting.comparison.agreed_step, setting.comparison.digests_by_step) == (64, {})


def test_kept_steps_are_bounded() -> None:
    """One member sends step after step, and the others none."""
    setting = Setting()
    for step in range(1, 1000):
        setting.add_digests(step, "b", [ONE])
        assert len(setting.comparison.digests_by_step) <= MAX_STEPS_KEPT
    setting.add_digests(999, "ca", [ONE, ONE])
    assert setting.comparison.agreed_step == 999


@pytest.mark.parametrize(
    ("names", "digests", "waits", "verdict"),
    [
        ("abc", "121", [0], (("ac", "b"), "b")),
        (
            "abcde",
            "1211",
            [0.9, 0.1],
            (("acd", "b"), "b"),
        ),  # a node without a digest is neither wrong nor right
        ("abcd", "1212", [0], (("ac", "bd"), "")),
        ("abcde", "112", [1, MAJORITY_NODE_TIMEOUTS], (("ab", "c"), "")),  # no majority of all members
    ],
    ids=["all", "majority", "halves", "minority"],
)
def test_verdict_falls_when_enough_is_known(
    names: str, digests: str, waits: list[float], verdict: tuple[tuple[str, ...], str]
) -> None:
    """It names the nodes outside a majority of all members."""
    setting = Setting(names)
    setting.add_digests(64, names[: len(digests)], [digit * 32 for digit in digests])
    *early, last = waits
    assert not any(map(setting.wait, early))
    groups, diverged = verdict
    assert setting.wait(last) == DivergenceVerdict(64, 0, tuple(map(tuple, groups)), tuple(diverged))


def test_verdict_waits_for_a_step_with_a_majority() -> None:
    """The third node digests fewer steps; until then two that differ show no majority."""
    setting = Setting()
    for step in (96, 100, 128):
        setting.add_digests(step, "ab", [ONE, OTHER])
        assert setting.wait(1) is None
    setting.add_digests(128, "c", [ONE])
    assert setting.wait(0) == DivergenceVerdict(128, 0, (("a", "c"), ("b",)), ("b",))


def test_verdict_without_a_majority_falls_after_a_limit() -> None:
    """No node is named. Equal digests of later steps change nothing."""
    setting = Setting()
    setting.add_digests(96, "ab", [ONE, OTHER])
    assert setting.wait(1) is None
    for step in range(128, 1000):
        setting.add_digests(step, "abc", [ONE] * 3)
        assert len(setting.comparison.digests_by_step) <= MAX_STEPS_KEPT
    assert setting.wait(MAJORITY_NODE_TIMEOUTS) == DivergenceVerdict(96, 0, (("a",), ("b",)))


def test_node_sends_the_common_step_of_the_running_generation() -> None:
    """A digest that was not sent before the generation ended is replaced; a late one is not sent."""
    outbox = FactOutbox([DIGESTS])
    first, later, next_view = (make_fact(*at) for at in ((7, 64), (7, 66), (8, 1)))
    outbox.add(first)
    outbox.add(later)
    assert outbox.take() == (first,)
    assert outbox.take() == ()
    outbox.add(later)  # the first one is sent already
    assert outbox.take() == (later,)
    outbox.add(first)
    outbox.add(next_view)
    outbox.add(first)
    assert outbox.take() == (next_view,)


def make_fact(generation: int, step: int, digest: str = ONE) -> Fact:
    """Return the fact of a digest."""
    return Fact(DIGESTS.name, generation, encode_body(StateDigest(step, digest)))


def find_judge(role: object) -> ReplicaComparison:
    """Return the judge of a leader."""
    assert isinstance(role, Leader)
    judge = role.board._judges[DIGESTS.name]
    assert isinstance(judge, ReplicaComparison)
    return judge


# Whole jobs.


def test_digests_of_other_generations_and_of_spares_are_ignored() -> None:
    """A digest may be ready late, and a spare's workers do not train."""
    scenario = Scenario("nodes=a,b,s candidates=a nnodes=1:2")
    scenario.play("start a b; run 5; start s; run 2; digest 64 a=x")
    agent = scenario.nodes["a"].agent
    assert agent
    assert isinstance(agent.role, Leader)
    links = {peer.incarnation.node: peer.link for peer in agent.role.peers}
    generation = agent.state.view.generation
    for name, fact in (
        ("b", make_fact(generation - 1, 64, OTHER)),
        ("s", make_fact(generation, 64, OTHER)),
    ):
        agent.role.handle_message(links[name], Heartbeat((fact,)))
    scenario.play("run 1")
    assert find_judge(agent.role).diverged_since is None
    agent.role.handle_message(links["b"], Heartbeat((make_fact(generation, 64, OTHER),)))
    assert find_judge(agent.role).diverged_since is not None


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
            self.sent[type(item.message).__name__] += 1
            (agent,) = [node.agent for node in self.nodes if node.name == name]
            assert agent is not None
            if isinstance(item.message, Heartbeat) and item.message.facts:
                self.sent["digest"] += 1
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
    assert not job.sent["JobEnd"]
    (leader,) = [node.agent.role for node in job.nodes if node.agent and isinstance(node.agent.role, Leader)]
    judge = find_judge(leader)
    assert judge.agreed_step >= 352, "multiples of 16 in the last second of 400 steps may be missing"
    assert len(judge.digests_by_step) <= MAX_STEPS_KEPT


@pytest.mark.parametrize("seed", range(16))
def test_diverged_replica_is_named_on_all_nodes(seed: int) -> None:
    """Within the steps that all nodes digest; with two nodes no node is named."""
    job = Job(seed)
    name = job.rng.choice(job.names)
    since = job.rng.randint(100, 200)
    job.train(400, 0.05, {name: since})
    node_timeout_steps = int(3 / 0.05)  # the wait for missing digests
    named = (name,) if len(job.names) > 2 else ()
    for node in job.nodes:
        assert node.end is not None
        assert isinstance(node.end.reason, JudgedFailure)
        verdict = decode_body(DivergenceVerdict, FactBody(node.end.reason.body))
        assert verdict.diverged == named
        assert verdict.agreed_step < since <= verdict.step < since + 48 + 2 * node_timeout_steps
