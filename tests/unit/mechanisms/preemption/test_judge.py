"""Test that ranks get a notice at one step boundary in any order of events, and that none waits for ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.mechanisms.mechanism import decode_body, encode_body
from elastic_resume.mechanisms.preemption.judge import (
    MAX_PATIENCE,
    NOTICES,
    Action,
    AgentWords,
    NoticeJudge,
    NoticeReport,
    NoticeVerdict,
    decide_at_boundary,
    find_patience,
    is_end_due,
)
from elastic_resume.rendezvous.facts import Fact, Scope

NODE_TIMEOUT_S = 3.0
GENERATION = 7


def make_judge(*nodes: str) -> NoticeJudge:
    """Return the judge of a view of these nodes."""
    return NoticeJudge(Scope(GENERATION, nodes, nodes[0], NODE_TIMEOUT_S))


def send(judge: NoticeJudge, node: str, report: NoticeReport, now: float) -> NoticeVerdict | None:
    """Give the judge a node's report; return the verdict, if there is one."""
    judge.add(node, Fact(NOTICES.name, GENERATION, encode_body(report)), now)
    return look(judge, now)


def look(judge: NoticeJudge, now: float) -> NoticeVerdict | None:
    """Return the verdict at this time."""
    body = judge.judge(now).body
    return decode_body(NoticeVerdict, body) if body else None


NOTICED = NoticeReport(is_used=True, reason="SIGTERM", seconds=30.0, patience=4)


def test_no_verdict_while_no_script_asks() -> None:
    """All agents learn that one does, before any notice: only then they delay a drain."""
    judge = make_judge("a", "b")
    assert look(judge, 0.0) is None
    assert send(judge, "b", NoticeReport(is_used=True), 1.0) == NoticeVerdict()


def test_boundary_is_the_greatest_bound_and_the_patience() -> None:
    """It is agreed when all nodes have a bound, with the time that is left then, and never changes."""
    judge = make_judge("a", "b")
    announced = NoticeVerdict("b", "SIGTERM", 4)
    assert send(judge, "b", NOTICED, 10.0) == announced
    assert send(judge, "b", replace(NOTICED, bound=11), 10.5) == announced
    agreed = NoticeVerdict("b", "SIGTERM", 4, 16, 29.0)
    assert send(judge, "a", NoticeReport(bound=12), 11.0) == agreed
    assert send(judge, "a", replace(NOTICED, bound=50, reason="another"), 12.0) == agreed
    assert look(judge, 1000.0) == agreed


def test_notice_is_void_without_a_bound_of_each_node() -> None:
    """It stays void when the last one comes."""
    judge = make_judge("a", "b")
    send(judge, "b", replace(NOTICED, bound=3), 10.0)
    assert look(judge, 10.0 + 2 * NODE_TIMEOUT_S - 0.1) == NoticeVerdict("b", "SIGTERM", 4)
    void = NoticeVerdict("b", "SIGTERM", 4, is_void=True)
    assert look(judge, 10.0 + 2 * NODE_TIMEOUT_S) == void
    assert send(judge, "a", NoticeReport(bound=3), 17.0) == void


def test_patience_lasts_while_agents_agree() -> None:
    """It is at least one step, and has a limit for loops that do nothing."""
    assert [find_patience(3.0, step_s) for step_s in (0.1, 1.0, 60.0, 0.0)] == [13, 2, 1, MAX_PATIENCE]


PENDING, AGREED = AgentWords(GENERATION, 1, 4), AgentWords(GENERATION, 1, 4, 9)


@pytest.mark.parametrize(
    ("count", "limit", "words", "expected"),
    [
        (3, 0, AgentWords(GENERATION, 1), (Action.GO, 0)),
        (3, 0, PENDING, (Action.GO, 7)),
        (6, 7, PENDING, (Action.GO, 7)),
        (7, 7, PENDING, (Action.WAIT, 7)),
        (7, 7, AGREED, (Action.GO, 7)),
        (8, 0, AGREED, (Action.GO, 0)),
        (9, 7, AGREED, (Action.TAKE, 7)),
        (7, 7, PENDING._replace(is_void=1), (Action.DROP, 0)),
        (7, 7, PENDING._replace(generation=GENERATION + 1), (Action.DROP, 0)),
    ],
)
def test_action_at_a_boundary(
    count: int, limit: int, words: AgentWords, expected: tuple[Action, int]
) -> None:
    """A rank waits at its limit for the agreed boundary, and for nothing that does not come any more."""
    assert decide_at_boundary(count, limit, words, GENERATION) == expected


@pytest.mark.parametrize(
    ("words", "count", "waited_s", "left_s", "expected"),
    [
        (AgentWords(GENERATION), 3, 0.0, 60.0, True),  # no script asks
        (AgentWords(GENERATION, 1), 3, 0.0, 60.0, False),
        (AgentWords(GENERATION, 1), 3, 6.0, 54.0, True),  # no leader answers
        (AgentWords(GENERATION, 1), 3, 0.0, 4.9, True),  # three steps, one more, and a reserve
        (AgentWords(GENERATION, 1), 3, 0.0, 5.1, False),
        (PENDING, 3, 6.0, 60.0, False),
        (AGREED, 8, 1.0, 60.0, False),  # at boundary 9 the script gets the notice
        (AGREED, 8, 1.0, 2.9, True),  # but not without the time for a step more
        (AGREED, 9, 1.0, 60.0, True),
        (PENDING._replace(is_void=1), 3, 0.0, 60.0, True),
        (PENDING._replace(generation=GENERATION + 1), 3, 0.0, 60.0, True),
    ],
)
def test_drained_worker_ends_after_the_notice_if_it_has_the_time(
    words: AgentWords, count: int, waited_s: float, left_s: float, expected: bool
) -> None:
    """With steps of one second."""
    found = is_end_due(words, GENERATION, count, step_s=1.0, waited_s=waited_s, left_s=left_s)
    assert found is expected


# ---- schedules -------------------------------------------------------------------------------------------


@dataclass
class SimulatedRank:
    """A rank: it trains a step, stores its count, looks for a notice, and perhaps is held."""

    count: int = 0
    entered: int = 1
    """The step whose collective it has come to."""
    must_look: bool = False
    is_held: bool = False
    limit: int = 0
    taken_at: int = 0
    is_over: bool = False


@dataclass
class SimulatedNode:
    """An agent and its ranks."""

    ranks: list[SimulatedRank]
    words: AgentWords = field(default_factory=lambda: AgentWords(GENERATION))
    verdicts: list[NoticeVerdict] = field(default_factory=list)
    """On their way to the agent."""
    reports: list[NoticeReport] = field(default_factory=list)
    """On their way to the leader."""
    report: NoticeReport = field(default_factory=NoticeReport)
    must_read: bool = False
    """It has stored a patience, and has not read the counts."""


class Job:
    """A view, of which any part that can act acts next."""

    def __init__(self, choice: random.Random, sizes: list[int], last_step: int, *, is_coupled: bool) -> None:
        self.choice, self.last_step, self.is_coupled = choice, last_step, is_coupled
        self.nodes = [SimulatedNode([SimulatedRank() for _ in range(size)]) for size in sizes]
        self.ranks = [rank for node in self.nodes for rank in node.ranks]
        self.judge = make_judge(*map(str, range(len(sizes))))
        self.now, self.sent = 0.0, NoticeVerdict()
        self.weights: dict[str, float] = {}
        self.void_after = choice.choice([0.0, 0.02])

    def run(self) -> None:
        """Let parts act until none can."""
        self.unnoticed = self.choice.sample(self.nodes, self.choice.randint(1, len(self.nodes)))
        while actions := self.list_actions():
            weights = [
                self.weights.setdefault(name, self.choice.choice([0.02, 1, 20])) for name, _ in actions
            ]
            (act,) = self.choice.choices([act for _, act in actions], weights)
            act()

    def list_actions(self) -> list[tuple[str, Callable[[], None]]]:
        """Return what can happen next."""
        found: list[tuple[str, Callable[[], None]]] = []
        for number, node in enumerate(self.nodes):
            if node in self.unnoticed:
                found.append((f"notice {number}", partial(self.notice, node)))
            if node.reports:
                found.append((f"report {number}", partial(self.deliver, number)))
            if node.must_read:
                found.append((f"read {number}", partial(self.read_counts, node)))
            elif node.verdicts:
                found.append((f"verdict {number}", partial(self.take_verdict, node)))
            for local_rank, rank in enumerate(node.ranks):
                if self.can_act(node, rank):
                    found.append((f"rank {number}.{local_rank}", partial(self.act, node, rank)))
        is_open = self.sent.patience and not self.sent.boundary and not self.sent.is_void
        if found and is_open and self.void_after:  # no rank has to wait for the leader to give up
            found.append(("time", self.pass_time))
        return found

    def pass_time(self) -> None:
        """Let so much time pass that the leader gives up, seldom."""
        if self.choice.random() < self.void_after:
            self.now += 100.0
            self.publish()

    def notice(self, node: SimulatedNode) -> None:
        """Announce that a node is to stop."""
        self.unnoticed.remove(node)
        patience = self.choice.choice([1, 1, 2, 5])
        node.report = replace(node.report, is_used=True, reason="SIGTERM", seconds=30.0, patience=patience)
        node.reports.append(node.report)

    def deliver(self, number: int) -> None:
        """Give the leader the newest report of a node."""
        node = self.nodes[number]
        report, node.reports = node.reports[-1], []
        self.judge.add(str(number), Fact(NOTICES.name, GENERATION, encode_body(report)), self.now)
        self.publish()

    def publish(self) -> None:
        """Send the verdict to all agents."""
        verdict = look(self.judge, self.now)
        if verdict is not None and verdict != self.sent:
            self.sent = verdict
            for node in self.nodes:
                node.verdicts.append(verdict)

    def take_verdict(self, node: SimulatedNode) -> None:
        """Store what the leader has found; the counts are read later."""
        verdict = node.verdicts.pop(0)
        is_new = not node.words.patience
        node.words = AgentWords(GENERATION, 1, verdict.patience, verdict.boundary, int(verdict.is_void))
        node.must_read = is_new and verdict.patience > 0

    def read_counts(self, node: SimulatedNode) -> None:
        """Send the bound, as `NoticePage.announce` computes it."""
        node.must_read = False
        node.report = replace(node.report, bound=1 + max(rank.count for rank in node.ranks))
        node.reports.append(node.report)

    def can_act(self, node: SimulatedNode, rank: SimulatedRank) -> bool:
        """Return whether a rank can go on; in a collective it waits for all others."""
        if rank.must_look:
            return True
        if rank.is_held:
            return decide_at_boundary(rank.count, rank.limit, node.words, GENERATION)[0] is not Action.WAIT
        is_free = not self.is_coupled or all(other.entered >= rank.entered for other in self.ranks)
        return rank.count < self.last_step and is_free

    def act(self, node: SimulatedNode, rank: SimulatedRank) -> None:
        """Look at the words at a step boundary, or train a step and store the count."""
        if not (rank.must_look or rank.is_held):
            rank.count += 1
            rank.must_look = True
            return
        rank.must_look = rank.is_held = False
        if not rank.is_over:
            action, rank.limit = decide_at_boundary(rank.count, rank.limit, node.words, GENERATION)
            rank.is_held = action is Action.WAIT
            rank.is_over = action in {Action.TAKE, Action.DROP}
            if action is Action.TAKE:
                rank.taken_at = rank.count
        if not rank.is_held:
            rank.entered = rank.count + 1


@settings(max_examples=600, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 30),
    st.booleans(),
)
def test_ranks_take_the_notice_at_one_boundary_in_any_schedule(
    seed: int, sizes: list[int], last_step: int, is_coupled: bool
) -> None:
    """And all come to the end: with and without collectives that couple them, whoever is slow or noticed."""
    job = Job(random.Random(seed), sizes, last_step, is_coupled=is_coupled)
    job.run()
    assert [rank.count for rank in job.ranks] == [last_step] * len(job.ranks)
    assert not any(rank.is_held for rank in job.ranks)
    expected = job.sent.boundary if job.sent.boundary <= last_step else 0
    assert {rank.taken_at for rank in job.ranks} == {expected}


def test_some_schedules_agree_and_some_are_void() -> None:
    """Else the test above would check nothing."""
    found = set()
    for seed in range(200):
        job = Job(random.Random(seed), [2, 2], 30, is_coupled=True)
        job.run()
        found.add((job.ranks[0].taken_at > 0, job.sent.is_void))
    assert found >= {(True, False), (False, True)}
