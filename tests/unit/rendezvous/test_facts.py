"""Test the channel of facts: what reaches a judge, and what its judgment does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_resume.policy.failure_classification import DIVERGENCE, Failure
from elastic_resume.policy.restart import GaveUp, NoProgress
from elastic_resume.rendezvous.core.interface import EndJob
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.facts import (
    Fact,
    FactBoard,
    FactBody,
    FactOutbox,
    Judge,
    Judgment,
    Scope,
    Topic,
)
from tests.support.rendezvous_sim.scenario import Scenario


class Recorder(Judge):
    """A judge that keeps what it gets, and finds what the test wants."""

    judgment = Judgment()
    heard: list[tuple[str, str]]

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        Recorder.heard = []

    def add(self, node: str, fact: Fact, now: float) -> None:
        """Keep the fact."""
        del now
        if fact.body == "malformed":
            raise ValueError(fact.body)
        self.heard.append((node, fact.body))

    def remove(self, node: str) -> None:
        """Keep the name."""
        self.heard.append((node, "lost"))

    def expect_newcomers(self, now: float, *, are_expected: bool) -> None:
        """Keep what is expected."""
        del now
        self.heard.append(("newcomers", str(are_expected)))

    def judge(self, now: float) -> Judgment:
        """Return what the test has set."""
        del now
        return replace(self.judgment, body=FactBody(f"{len(self.heard)}") if self.heard else FactBody(""))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """Start a view of a, which leads, and b; s is a spare."""
    monkeypatch.setattr(Recorder, "judgment", Judgment())
    started = Scenario("nodes=a,b,s candidates=a nnodes=1:2")
    for node in started.nodes.values():
        node.topics = (Topic("t", Recorder),)
    started.play("start a b; run 5; start s; run 2")
    return started


def send(job: Scenario, name: str, body: str, generation: int = 1, topic: str = "t") -> None:
    """Let a node send a fact."""
    job.nodes[name]._handle_event(Fact(topic, generation, FactBody(body)))


def find_verdicts(job: Scenario) -> dict[str, str]:
    """Return the verdict that each node knows."""
    known = {name: node.agent.state.verdicts for name, node in job.nodes.items() if node.agent}
    return {name: verdicts["t"].body for name, verdicts in known.items() if "t" in verdicts}


def test_judge_hears_members_of_its_generation_and_all_learn_its_verdict(job: Scenario) -> None:
    """A spare's, a malformed and an unknown fact, and those of other generations, are dropped."""
    send(job, "b", "one")
    send(job, "a", "two")
    send(job, "s", "spare")
    job.play("run 1")
    send(job, "b", "late", generation=0)
    send(job, "a", "early", generation=2)
    send(job, "b", "unknown", topic="u")
    job.play("run 1")
    assert sorted(Recorder.heard) == [("a", "two"), ("b", "one")]
    assert find_verdicts(job) == dict.fromkeys("abs", "2")
    job.play("kill-worker b; run 5")
    assert Recorder.heard == []
    assert find_verdicts(job) == {}


def test_malformed_fact_is_dropped(job: Scenario) -> None:
    """The next one counts."""
    send(job, "b", "malformed")
    job.play("run 1")
    assert find_verdicts(job) == {}
    send(job, "b", "one")
    job.play("run 1")
    assert find_verdicts(job) == dict.fromkeys("abs", "1")


def test_newest_fact_is_sent_again_after_a_broken_connection(job: Scenario) -> None:
    """It may have been lost."""
    send(job, "b", "one")
    job.play("run 1; reset a b; run 1")
    assert Recorder.heard == [("b", "one")] * 2


def test_judgment_fails_the_job_on_all_nodes(job: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its reason, and with the root causes that it names."""
    reason = GaveUp("b", NoProgress(None, 1, 0))
    cause = Failure(DIVERGENCE, "b", None, step=7)
    monkeypatch.setattr(Recorder, "judgment", Judgment(job_failure=reason, root_causes=(cause,)))
    send(job, "b", "one")
    job.play("run 1")
    ends = [node.end for node in job.nodes.values()]
    assert [end.reason for end in ends if isinstance(end, EndJob)] == [reason] * 3
    assert [end.failures[0].node for end in ends if isinstance(end, EndJob)] == ["b"] * 3


def test_judge_learns_that_a_node_is_lost(job: Scenario) -> None:
    """Else it would compare with the facts of a dead one."""
    send(job, "s", "spare")
    job.play("kill s; run 8")
    assert ("s", "lost") in Recorder.heard


@pytest.mark.parametrize("do_join", [True, False])
def test_judge_learns_of_newcomers_before_the_view_ends_for_them(do_join: bool) -> None:
    """If they die before, the view goes on."""
    job = Scenario("nodes=a,b,c candidates=a nnodes=1:3")
    for node in job.nodes.values():
        node.topics = (Topic("t", Recorder),)
    job.play("start a b; run 6; start c; run 0.7")
    agent = job.nodes["a"].agent
    assert agent
    assert isinstance(agent.role, Leader)
    assert Recorder.heard == [("newcomers", "True")]
    assert agent.role.active_view
    assert len(agent.role.active_view.members) == 2
    assert find_verdicts(job)["b"] == "1"
    job.play("run 2" if do_join else "kill c; run 2")
    assert agent.role.active_view
    assert len(agent.role.active_view.members) == (3 if do_join else 2)
    assert (("newcomers", "False") in Recorder.heard) is not do_join


@pytest.mark.parametrize("is_late", [True, False])
def test_judge_may_delay_the_end_of_a_view_for_newcomers(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Also for a newcomer that joined long before it was ready, so that its time has come when it is."""
    monkeypatch.setattr(Recorder, "judgment", Judgment(delays_newcomers=True))
    job = Scenario("nodes=a,b,c candidates=a nnodes=1:3")
    for node in job.nodes.values():
        node.topics = (Topic("t", Recorder),)
    before = "begin-preparation c; start c; run 5; finish-preparation c" if is_late else "start c"
    job.play(f"start a b; run 6; {before}; run 20")
    leader = job.nodes["a"].agent
    assert leader
    assert isinstance(leader.role, Leader)
    assert leader.role.active_view
    assert len(leader.role.active_view.members) == 2
    assert Recorder.heard == [("newcomers", "True")]
    monkeypatch.setattr(Recorder, "judgment", Judgment())
    job.play("run 2")
    assert leader.role.active_view
    assert len(leader.role.active_view.members) == 3


def test_scope_names_members_in_rank_order(job: Scenario) -> None:
    """A judge compares all members, so it knows whom it has not heard."""
    agent = job.nodes["a"].agent
    assert agent
    assert isinstance(agent.role, Leader)
    judge = agent.role.board._judges["t"]
    assert isinstance(judge, Recorder)
    assert judge.scope == Scope(1, ("a", "b"), "a", 3.0)


def test_judge_of_the_job_is_made_with_its_first_fact_and_knows_the_running_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is imported then: a start pays for no topic that the job does not use."""
    made: list[Scope] = []
    views: list[tuple[int, tuple[str, ...]]] = []

    class JobJudge(Recorder):
        def __init__(self, scope: Scope) -> None:
            super().__init__(scope)
            made.append(scope)

        def start_view(self, generation: int, members: tuple[str, ...]) -> None:
            views.append((generation, members))

    topics = (Topic("t", JobJudge, is_of_job=True),)
    job_scope = Scope(0, (), "a", 5.0)
    board = FactBoard(topics, {}, job_scope)
    board.start_view(3, ("a", "b"))
    board.judge(1.0)
    assert not made
    board.add("s", (Fact("t", 0, FactBody("from a spare")),), 1.0, is_member=False)
    assert (made, views, Recorder.heard) == ([job_scope], [(3, ("a", "b"))], [("s", "from a spare")])
    board.judge(1.0)
    board.end_view()
    assert board.verdicts == {"t": Fact("t", 0, FactBody("1"))}
    monkeypatch.setattr(JobJudge, "judge", lambda *_: Judgment())
    board.judge(2.0)
    assert board.verdicts == {"t": Fact("t", 0, FactBody("1"))}, "followers keep it too"
    FactBoard(topics, {**board.verdicts, "unknown": Fact("unknown", 0, FactBody("x"))}, job_scope)
    assert made[1:] == [replace(job_scope, last_body=FactBody("1"))]


def test_outbox_keeps_the_fact_that_its_topic_chooses() -> None:
    """Of those that wait for one heartbeat; a fact of an earlier generation replaces none."""
    outbox = FactOutbox([Topic("t", Recorder, choose=lambda kept, new: FactBody(max(kept, new)))])
    for generation, body in ((1, "b"), (1, "a"), (0, "z")):
        outbox.add(Fact("t", generation, FactBody(body)))
    assert outbox.take() == (Fact("t", 1, FactBody("b")),)
    assert outbox.take() == ()
    outbox.renew()
    assert outbox.take() == (Fact("t", 1, FactBody("b")),)
