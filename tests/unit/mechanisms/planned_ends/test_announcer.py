"""Test an agent's announcer and the leader's judge together, without a job."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_resume.mechanisms.mechanism import encode_body
from elastic_resume.mechanisms.planned_ends.announcer import EndAnnouncer
from elastic_resume.mechanisms.planned_ends.judge import PLANNED_ENDS, EndJudge, PlannedEnd
from elastic_resume.rendezvous.facts import Fact, Scope
from tests.support.agent_parts import make_agent_context

GENERATION = 3
NODE_TIMEOUT_S = 10.0
DRAINED = Fact(PLANNED_ENDS.name, GENERATION, encode_body(PlannedEnd(is_planned=True)))


class Node:
    """An announcer, and the word that it stores for its workers."""

    def __init__(self) -> None:
        self.until_ms = 0
        self.client: Any = Mock(verdicts={})
        self.client.wait_for_verdicts.side_effect = self.wait
        committer = SimpleNamespace(slot_pool=SimpleNamespace(control_block=self))
        context = make_agent_context(committer=committer)._replace(node_timeout_s=NODE_TIMEOUT_S)
        self.announcer = EndAnnouncer(context)
        self.announcer.start(self.client)

    def set(self, name: str, value: int) -> None:
        """Stand for the control block's method."""
        assert name == "planned_end_ms"
        self.until_ms = value

    def wait(self, known: object, timeout_s: float) -> object:
        """Stand for the client's method."""
        del known
        time.sleep(min(timeout_s, 0.001))
        return self.client.verdicts

    def begin(self, generation: int = GENERATION, members: int = 2) -> None:
        """Begin a generation."""
        self.announcer.begin_generation(Mock(generation=generation, members=[None] * members))

    def await_word(self, *, is_stored: bool) -> None:
        """Wait for the announcer's thread."""
        deadline = time.monotonic() + 20
        while bool(self.until_ms) is not is_stored:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def node() -> Iterator[Node]:
    """Make a node, and close it."""
    made = Node()
    with contextlib.closing(made.announcer):
        yield made


def test_drained_node_tells_the_leader_and_trains_on_for_two_heartbeats(node: Node) -> None:
    """A second signal changes nothing, nor does the leader's verdict about this node itself."""
    node.begin()
    began_ms = time.monotonic() * 1000
    node.announcer.begin_stop("SIGTERM")
    until_ms = node.until_ms
    assert began_ms + 2000 - 1 <= until_ms <= time.monotonic() * 1000 + 2000
    (call,) = node.client.send_fact.call_args_list
    assert call.args == (PLANNED_ENDS.name, GENERATION, DRAINED.body)
    node.client.verdicts = {PLANNED_ENDS.name: DRAINED}
    node.announcer.begin_stop("SIGTERM")
    time.sleep(0.02)
    assert node.until_ms == until_ms
    assert node.client.send_fact.call_count == 1


def test_only_node_leaves_at_once(node: Node) -> None:
    """There is nobody to tell."""
    node.begin(members=1)
    node.announcer.begin_stop("SIGTERM")
    assert 0 < node.until_ms <= time.monotonic() * 1000
    assert not node.client.send_fact.called


def test_workers_learn_of_a_planned_end_and_of_its_end(node: Node) -> None:
    """Newcomers may not come; the next generation knows nothing of an end of this one."""
    node.begin()
    node.client.verdicts = {PLANNED_ENDS.name: DRAINED}
    node.await_word(is_stored=True)
    assert node.until_ms <= time.monotonic() * 1000
    node.client.verdicts = {}
    node.await_word(is_stored=False)
    node.client.verdicts = {PLANNED_ENDS.name: DRAINED}
    node.await_word(is_stored=True)
    node.begin(GENERATION + 1)
    assert node.until_ms == 0
    time.sleep(0.02)
    assert node.until_ms == 0, "the verdict is of another generation"


def test_leader_plans_an_end_for_a_drained_member_and_for_newcomers() -> None:
    """Newcomers that stay away are forgotten; a drained member is not."""
    judge = EndJudge(Scope(GENERATION, ("n0", "n1"), "n0", NODE_TIMEOUT_S))
    assert not judge.judge(0.0).body
    judge.expect_newcomers(are_expected=True)
    assert judge.judge(0.0).body == DRAINED.body
    judge.expect_newcomers(are_expected=False)
    assert not judge.judge(0.0).body
    judge.add("n1", DRAINED, 0.0)
    judge.expect_newcomers(are_expected=False)
    assert judge.judge(0.0).body == DRAINED.body
