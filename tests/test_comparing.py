"""The leader's comparison: what it remembers and asks, and that it finds whoever is wrong, and only those."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from elastic_resume.policy.divergence import Digest, Groups, due
from elastic_resume.rendezvous.body import KEPT_PRINTS, Body
from elastic_resume.rendezvous.comparing import DOUBT_TIMEOUTS, KEPT_STEPS, Comparer
from elastic_resume.rendezvous.leading import Leader
from elastic_resume.rendezvous.link import Link
from elastic_resume.rendezvous.messages import Beat, Diverged, Explain, Message, Print, Prints
from elastic_resume.rendezvous.quorum import Incarnation, Knowledge, World
from elastic_resume.rendezvous.roster import Part, Roster
from elastic_resume.rendezvous.steps import AskPrints, Explained, ReplicasDiffer, Send, Settings
from tests.support.rendezvous_sim.checkers import Checkers
from tests.support.rendezvous_sim.net import Clock, Network
from tests.support.rendezvous_sim.node import Node

ONE, OTHER = Digest("1" * 32), Digest("2" * 32)
SAME, CHANGED = Groups(("a" * 16, "b" * 16)), Groups(("a" * 16, "c" * 16))


class Table:
    """A leader `a` and its followers in generation 7, and all that is said to them."""

    def __init__(self, names: str = "abc", *, on: str = "stop") -> None:
        self.who = {name: Incarnation(name, "1") for name in names}
        members = tuple(self.who.values())
        self.body = Body(Settings(("a",), resume_from_majority=on != "stop"), members[0], None, 0.0)
        self.world = World(7, members, members[0])
        self.body.known = Knowledge(1, self.world)
        self.body.running = self.world
        roster = Roster()
        for number, name in enumerate(names[1:]):
            roster.add(Part(self.who[name], Link(-number - 1), running=7))
        self.said: list[tuple[str, Message]] = []
        self.comparer = Comparer(self.body, roster, lambda part, it: self.said.append((part.who.node, it)))
        self.comparer.began(self.world)

    def tell(self, name: str, step: int, digest: Digest, generation: int = 7) -> None:
        """One member's heartbeat."""
        self.comparer.told(self.who[name], Print(generation, step, digest))

    def asked(self) -> list[str]:
        """Who is asked, and forget it."""
        names = [name for name, message in self.said if isinstance(message, Explain)]
        names += [self.body.me.node for effect in self.body.effects if isinstance(effect, AskPrints)]
        self.said.clear()
        self.body.effects.clear()
        return sorted(names)

    def found(self) -> Diverged | None:
        """What all were told."""
        told = {message for _, message in self.said if isinstance(message, Diverged)}
        told |= {effect.told for effect in self.body.effects if isinstance(effect, ReplicasDiffer)}
        assert len(told) <= 1
        return next(iter(told), None)


def test_equal_prints_are_forgotten_and_the_step_is_remembered() -> None:
    """Late ones of earlier steps too; nobody is asked anything."""
    table = Table()
    for name in "abc":
        table.tell(name, 64, ONE)
    table.tell("a", 32, OTHER)
    table.tell("b", 32, ONE)
    assert (table.comparer.agreed, table.comparer.steps) == (64, {})
    assert not table.asked()


def test_only_prints_of_members_of_the_running_generation_are_compared() -> None:
    """A digest may be ready late, and a spare's workers do not train."""
    table = Table()
    table.tell("a", 64, ONE)
    table.tell("b", 64, OTHER, generation=6)
    table.comparer.told(Incarnation("spare", "1"), Print(7, 64, OTHER))
    table.comparer.told(Incarnation("b", "0"), Print(7, 64, OTHER))
    assert not table.asked()
    table.comparer.over()
    table.tell("b", 64, OTHER)
    table.comparer.began(World(8, table.world.members, table.world.leader))
    table.tell("b", 64, OTHER)
    table.tell("b", 64, OTHER, generation=8)
    assert not table.asked()


def test_what_is_remembered_is_bounded() -> None:
    """One member that tells of step after step, and others that tell of none."""
    table = Table()
    for step in range(1, 1000):
        table.tell("b", step, ONE)
        assert len(table.comparer.steps) <= KEPT_STEPS
    table.tell("c", 999, ONE)
    table.tell("a", 999, ONE)
    assert table.comparer.agreed == 999


def test_all_are_asked_once_and_answer_once() -> None:
    """However many more differences are seen meanwhile; who was not asked is not heard."""
    table = Table()
    table.tell("a", 64, ONE)
    table.tell("b", 64, OTHER)
    assert table.asked() == ["a", "b", "c"]
    table.tell("c", 64, ONE)
    table.tell("a", 96, ONE)
    table.tell("b", 96, OTHER)
    assert not table.asked()
    comparer, who = table.comparer, table.who
    comparer.explained(who["c"], Prints(7, 64, None, SAME))
    comparer.explained(who["c"], Prints(7, 64, None, CHANGED))
    comparer.explained(who["b"], Prints(7, 32, None, SAME))
    comparer.explained(who["b"], Prints(6, 64, None, SAME))
    comparer.explained(Incarnation("d", "1"), Prints(7, 64, None, SAME))
    assert not comparer.advance()
    assert table.found() is None
    comparer.explained(who["b"], Prints(7, 64, None, CHANGED))
    comparer.explained(who["a"], Prints(7, 64, None, SAME), ("weight", "bias"))
    assert not comparer.advance()
    assert table.found() == Diverged(7, 64, 0, (("a", "c"), ("b",)), ("b",), (1,), 1, goes_on=False)
    assert table.body.failed.startswith("replicas differ at step 64: node b is not as nodes a and c")
    assert "first in bias." in table.body.failed


@pytest.mark.parametrize("answers", [{}, {"a": SAME}, {"a": SAME, "b": SAME}, {"b": Groups(())}])
def test_digests_tell_who_is_wrong_where_nobody_explains_more(answers: dict[str, Groups]) -> None:
    """After a node timeout; also where all that explain themselves are equal in what they explain."""
    table = Table(on="resume-from-majority")
    for name, digest in zip("abc", [ONE, OTHER, ONE], strict=True):
        table.tell(name, 64, digest)
    for name, groups in answers.items():
        table.comparer.explained(table.who[name], Prints(7, 64, None, groups))
    assert not table.comparer.advance()
    table.body.now += table.body.settings.node_timeout_s
    assert (
        table.comparer.advance() == "replicas differ at step 64: node b is not as nodes a and c, the majority"
    )
    assert table.found() == Diverged(7, 64, 0, (("a", "c"), ("b",)), ("b",), (), 0, goes_on=True)
    assert not table.body.failed
    table.asked()
    for name, digest in zip("abc", [ONE, OTHER, ONE], strict=True):
        table.tell(name, 128, digest)
    assert not table.asked(), "what is known need not be asked again in this world"


def test_who_tells_nothing_is_no_part_of_a_majority() -> None:
    """Two of five that agree are fewer than the three that did not tell, or otherwise."""
    table = Table("abcde", on="resume-from-majority")
    for name, digest in zip("abc", [ONE, ONE, OTHER], strict=True):
        table.tell(name, 64, digest)
    table.body.now += table.body.settings.node_timeout_s
    assert not table.comparer.advance()
    assert table.found() is None, "a later step may tell more"
    table.body.now += DOUBT_TIMEOUTS * table.body.settings.node_timeout_s
    assert not table.comparer.advance()
    assert table.found() == Diverged(7, 64, 0, (("a", "b"), ("c",)), (), (), 0, goes_on=False)


def test_a_leader_in_doubt_waits_for_a_step_that_more_tell_of() -> None:
    """The third node digests more seldom; until it tells, the two that differ name nobody."""
    table = Table(on="resume-from-majority")
    comparer, timeout_s = table.comparer, table.body.settings.node_timeout_s
    table.tell("a", 96, ONE)
    table.tell("b", 96, OTHER)
    assert table.asked() == ["a", "b", "c"]
    table.body.now += timeout_s
    assert not comparer.advance()
    table.tell("a", 100, ONE)
    table.tell("b", 100, OTHER)
    assert not table.asked(), "that step says no more"
    table.tell("a", 128, ONE)
    table.tell("b", 128, OTHER)
    table.tell("c", 128, ONE)
    assert table.asked() == ["a", "b", "c"]
    table.body.now += timeout_s
    assert comparer.advance()
    assert table.found() == Diverged(7, 128, 0, (("a", "c"), ("b",)), ("b",), (), 0, goes_on=True)


def test_a_step_that_shows_who_is_wrong_may_have_been_told_of_before_the_doubt() -> None:
    """While all were asked about another one."""
    table = Table()
    table.tell("a", 96, ONE)
    table.tell("b", 96, OTHER)
    for name, digest in zip("abc", [ONE, OTHER, ONE], strict=True):
        table.tell(name, 128, digest)
    table.asked()
    table.body.now += table.body.settings.node_timeout_s
    assert not table.comparer.advance()
    assert table.asked() == ["a", "b", "c"]


def test_a_step_that_is_told_of_after_it_was_forgotten_harms_nothing() -> None:
    """An answer about it brings it back, beyond what is remembered."""
    table = Table()
    comparer = table.comparer
    table.tell("a", 1, ONE)
    table.tell("b", 1, OTHER)
    for step in range(2, KEPT_STEPS + 9):
        table.tell("b", step, ONE)
    comparer.explained(table.who["b"], Prints(7, 1, OTHER, SAME))
    comparer.explained(table.who["c"], Prints(7, 1, ONE, SAME))
    table.body.now += table.body.settings.node_timeout_s
    assert not comparer.advance()
    assert comparer.doubt is not None
    table.tell("b", 1, OTHER)
    assert 1 not in comparer.steps


def test_a_doubt_comes_to_an_end() -> None:
    """Nobody is named then, and by either policy the job ends; that all were equal later excuses nothing."""
    table = Table(on="resume-from-majority")
    settings = table.body.settings
    table.tell("a", 96, ONE)
    table.tell("b", 96, OTHER)
    table.body.now += settings.node_timeout_s
    assert not table.comparer.advance()
    for name in "abc":
        table.tell(name, 128, ONE)
    table.body.now += DOUBT_TIMEOUTS * settings.node_timeout_s
    assert not table.comparer.advance()
    assert table.found() == Diverged(7, 96, 0, (("a",), ("b",)), (), (), 0, goes_on=False)
    assert "no majority" in table.body.failed
    assert not table.comparer.advance()


def test_who_explains_more_and_who_tells_its_digest_only_are_compared() -> None:
    """A heartbeat may have had no room for the digest: the answer brings it."""
    table = Table("abcd")
    table.tell("a", 64, ONE)
    table.tell("d", 64, OTHER)
    for name in "bc":
        table.comparer.explained(table.who[name], Prints(7, 64, ONE, SAME))
    table.comparer.explained(table.who["d"], Prints(7, 64, OTHER, CHANGED))
    table.comparer.explained(table.who["a"], Prints(7, 64, None, Groups(())))
    assert not table.comparer.advance()
    assert table.found() == Diverged(7, 64, 0, (("a", "b", "c"), ("d",)), ("d",), (1,), 1, goes_on=False)


def test_an_explanation_without_a_digest_is_compared_with_those_that_have_both() -> None:
    """Where it is not among them, nothing is known of that node."""
    table = Table("abcd")
    for name, digest in zip("ab", [ONE, OTHER], strict=True):
        table.tell(name, 64, digest)
    for name, groups in zip("abcd", [SAME, CHANGED, SAME, Groups(("d" * 16,))], strict=True):
        table.comparer.explained(table.who[name], Prints(7, 64, None, groups))
    assert not table.comparer.advance()
    table.body.now += DOUBT_TIMEOUTS * table.body.settings.node_timeout_s
    assert not table.comparer.advance()
    assert table.found() == Diverged(7, 64, 0, (("a", "c"), ("b",)), (), (1,), 1, goes_on=False)


def test_a_node_explains_with_the_digest_that_it_has_made() -> None:
    """Of the newest ones, whether a heartbeat has told of them or not."""
    body = Table().body
    for step in range(1, 1000):
        body.digested(Print(7, step, ONE))
    assert body.explain(Explained(7, 999, SAME)) == Prints(7, 999, ONE, SAME)
    assert body.explain(Explained(7, 999 - KEPT_PRINTS + 1, SAME)).digest == ONE
    assert body.explain(Explained(7, 999 - KEPT_PRINTS, SAME)).digest is None
    assert body.explain(Explained(6, 999, SAME)).digest is None


def test_equal_explanations_are_kept_once() -> None:
    """A thousand nodes that answer with 4096 digests each would not fit."""
    table = Table()
    table.tell("a", 64, ONE)
    table.tell("b", 64, OTHER)
    for name in "bc":
        table.comparer.explained(table.who[name], Prints(7, 64, None, Groups(tuple(SAME))))
    question = table.comparer.question
    assert question is not None
    assert len({id(groups) for groups in question.groups.values()}) == 1


def test_a_digest_of_an_earlier_world_is_not_told_of_a_later_one() -> None:
    """It may be ready late. Of one generation the rounder step is told, of two the later one."""
    body = Table().body
    body.digested(Print(6, 64, ONE))
    assert body.take_print() is None
    body.digested(Print(7, 64, ONE))
    body.digested(Print(7, 66, ONE))
    body.digested(Print(6, 128, ONE))
    assert body.take_print() == Print(7, 64, ONE)
    assert body.take_print() is None
    body.digested(Print(7, 64, ONE))
    body.running = World(8, body.running.members, body.me) if body.running else None
    body.digested(Print(8, 1, ONE))
    assert body.take_print() == Print(8, 1, ONE)


# ---- whole jobs ----------------------------------------------------------------------------------------


class Job:
    """Nodes that train in step and digest by budgets of their own, some time after each step."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        count = rng.choice((2, 3, 3, 4, 5))
        self.names = "abcde"[:count]
        self.on = rng.random() < 0.5
        settings = Settings(tuple(self.names), max_nodes=count, settle_s=0.5, resume_from_majority=self.on)
        self.clock = Clock()
        self.clock.steps = -1_000_000
        net = self.net = Network(self.clock, rng)
        self.nodes = [Node(name, settings, net, Checkers()) for name in self.names]
        self.gaps = [1 << rng.randint(0, 4) for _ in self.names]
        self.lags_s = [rng.uniform(0, 0.5) for _ in self.names]
        self.sent: Counter[str] = Counter()
        for node in self.nodes:
            node.story = self.see
            node.explain_s = rng.uniform(0, 4)
            node.boot()
        self.clock.run_until(5)
        assert all(node.running for node in self.nodes)

    def see(self, name: str, what: object) -> None:
        """Count what is sent; prints go to the leader only."""
        if isinstance(what, Send):
            kind = type(what.message).__name__
            self.sent[kind] += 1
            if isinstance(what.message, Beat) and what.message.told:
                self.sent["print"] += 1
                assert not isinstance(next(one for one in self.nodes if one.name == name).agent.role, Leader)  # type: ignore[union-attr]

    def train(self, steps: int, step_s: float, wrong: dict[str, int]) -> None:
        """Train; a node in `wrong` holds something else from that step on."""
        for step in range(1, steps + 1):
            self.clock.run_until(self.clock.now + step_s)
            for node, gap, lag_s in zip(self.nodes, self.gaps, self.lags_s, strict=True):
                if due(step, gap):
                    differs = wrong.get(node.name, steps + 1) <= step
                    state = f"{step:06}" + ("x" if differs else "-") + "tail"
                    self.clock.at(self.clock.now + lag_s, self._digest, node, step, state)
            if self.rng.random() < 0.01:
                one, other = self.rng.sample(self.names, 2)
                self.net.reset(one, other)
        self.clock.run_until(self.clock.now + 6)

    def _digest(self, node: Node, step: int, state: str) -> None:
        if node.running:
            node.digest(step, state)


@pytest.mark.parametrize("seed", range(12))
def test_replicas_that_are_equal_are_never_said_to_differ(seed: int) -> None:
    """Whatever the budgets, lags and broken links; and the newest step at which all were equal is known."""
    job = Job(seed)
    job.train(400, 0.05, {})
    assert job.sent["print"] > 0
    assert not job.sent["Explain"] + job.sent["Prints"] + job.sent["Diverged"] + job.sent["JobEnd"]
    (leader,) = [node.agent.role for node in job.nodes if node.agent and isinstance(node.agent.role, Leader)]
    assert leader.comparer.agreed >= 352, "of 400 steps, the multiples of 16 that fell into the last second"
    assert len(leader.comparer.steps) <= KEPT_STEPS


@pytest.mark.parametrize("seed", range(16))
def test_one_replica_that_differs_is_named_on_all_nodes(seed: int) -> None:
    """Within the steps that all nodes tell of; with two nodes nobody is named."""
    job = Job(seed)
    name = job.rng.choice(job.names)
    since = job.rng.randint(100, 200)
    job.train(400, 0.05, {name: since})
    node_timeout_steps = int(3 / 0.05)  # to wait for those who do not explain their state
    named = (name,) if len(job.names) > 2 else ()
    assert any(node.differed for node in job.nodes)
    for node in job.nodes:
        if not node.differed:  # its link broke in that moment
            assert "EndJob: replicas differ" in node.ended
            continue
        told = node.differed[0]
        assert told.wrong == named
        assert told.agreed_step < since <= told.step < since + 48 + 2 * node_timeout_steps
        assert told.goes_on == (bool(named) and job.on)
        assert told.differing in {(6,), ()}, (
            "the letter in the state that differs, where two explained theirs"
        )
    if not told.goes_on and told.generation == 1:
        others = len(job.names) - 1
        assert job.sent["Explain"] <= 2 * others
        assert job.sent["Diverged"] <= others
