"""Test an agent's announcer and the leader's judge together, without a job."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_resume import constants
from elastic_resume.mechanisms.mechanism import decode_body, encode_body
from elastic_resume.mechanisms.planned_ends.announcer import EndAnnouncer
from elastic_resume.mechanisms.planned_ends.judge import (
    ENDS,
    MAX_DELAY_S,
    PLANNED,
    EndJudge,
    EndReport,
)
from elastic_resume.policy.checkpoint_interval import IntervalSetting
from elastic_resume.rendezvous.facts import Fact, Judgment, Scope
from elastic_resume.slots.progress_page import ProgressPage, WorkerProcess
from elastic_resume.slots.slot_memory import SlotState, encode_snapshot_id
from tests.support.agent_parts import make_agent_context

GENERATION = 3
NODE_TIMEOUT_S = 10.0
VERDICT = {ENDS.name: Fact(ENDS.name, GENERATION, PLANNED)}


class Node:
    """An announcer, the word that it stores for its workers, and what these have finished and copied."""

    def __init__(self, node_dir: Path, snapshot_every: str = "auto") -> None:
        self.until_ms = self.snapshot_step = 0
        self.client: Any = Mock(verdicts={})
        self.client.wait_for_verdicts.side_effect = self.wait
        self.page = ProgressPage(node_dir / constants.PROGRESS_FILE)
        committer = SimpleNamespace(slot_pool=SimpleNamespace(control_block=self))
        settings = {"snapshot_every": IntervalSetting.parse(snapshot_every, allow_off=True)}
        context = make_agent_context(node_dir=node_dir, committer=committer, settings=settings)
        self.announcer = EndAnnouncer(context._replace(node_timeout_s=NODE_TIMEOUT_S))
        self.announcer.start(self.client)

    def set(self, name: str, value: int) -> None:
        """Stand for the control block's method."""
        assert name == "planned_end_ms"
        self.until_ms = value

    def read_slots(self) -> list[SlotState]:
        """Stand for the control block's method: one of the slots has a snapshot."""
        snapshot_id = encode_snapshot_id(GENERATION, self.snapshot_step) if self.snapshot_step else 0
        return [SlotState(0, 1, 4096, snapshot_id, bool(snapshot_id)), SlotState(1, 2, 4096, 0, False)]

    def wait(self, known: object, timeout_s: float) -> object:
        """Stand for the client's method."""
        del known
        time.sleep(min(timeout_s, 0.001))
        return self.client.verdicts

    def begin(self, generation: int = GENERATION, members: int = 2) -> None:
        """Begin a generation, whose worker starts after step 5."""
        self.announcer.begin_generation(Mock(generation=generation, members=[None] * members))
        worker = WorkerProcess(0, os.getpid(), generation, os.getpid(), 1, 0, 0)
        self.page.start_generation(0, generation=generation, step=5, world_size=1, worker=worker)

    def plan(self) -> None:
        """Send the leader's verdict."""
        self.client.verdicts = VERDICT

    def list_reports(self) -> list[EndReport]:
        """Return what was reported so far."""
        return [decode_body(EndReport, call.args[2]) for call in self.client.send_fact.call_args_list]

    def await_(self, condition: Callable[[], bool]) -> None:
        """Wait for the announcer's thread."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.list_reports()
            time.sleep(0.001)

    def close(self) -> None:
        """End the thread."""
        self.announcer.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Make a node, and close it."""
    with contextlib.closing(Node(tmp_path)) as made:
        yield made


def test_drained_node_tells_the_leader_and_trains_on_for_two_heartbeats(node: Node) -> None:
    """A second signal changes nothing, nor does the leader's verdict. In the next view it is told again."""
    node.begin()
    began_ms = time.monotonic() * 1000
    node.announcer.begin_stop("SIGTERM")
    until_ms = node.until_ms
    assert began_ms + 2000 - 1 <= until_ms <= time.monotonic() * 1000 + 2000
    assert node.list_reports()[0].is_drained
    node.plan()
    node.announcer.begin_stop("SIGTERM")
    node.await_(lambda: node.list_reports()[-1] == EndReport(is_drained=True, is_prepared=True))
    assert node.until_ms == until_ms
    node.begin(GENERATION + 1)
    (name, generation, body) = node.client.send_fact.call_args_list[-1].args
    assert (name, generation) == (ENDS.name, GENERATION + 1)
    assert decode_body(EndReport, body).is_drained
    assert node.until_ms >= until_ms


def test_only_node_leaves_at_once(node: Node) -> None:
    """There is nobody to tell."""
    node.begin(members=1)
    node.announcer.begin_stop("SIGTERM")
    assert 0 < node.until_ms <= time.monotonic() * 1000
    assert not node.client.send_fact.called


def test_workers_learn_of_a_planned_end_and_of_its_end(node: Node) -> None:
    """Newcomers may not come; the next generation knows nothing of an end of this one."""
    node.begin()
    node.plan()
    node.await_(lambda: node.until_ms > 0)
    node.client.verdicts = {}
    node.await_(lambda: node.until_ms == 0)
    node.plan()
    node.await_(lambda: node.until_ms > 0)
    node.begin(GENERATION + 1)
    assert node.until_ms == 0
    time.sleep(0.02)
    assert node.until_ms == 0, "the verdict is of another generation"


def test_node_reports_when_its_newest_step_has_a_snapshot(node: Node) -> None:
    """Steps of a generation before, and a start without a step, need none."""
    node.begin()
    node.page.finish_step(0, 7)
    node.snapshot_step = 6
    node.plan()
    node.await_(lambda: node.list_reports() == [EndReport(is_prepared=False)])
    node.snapshot_step = 7
    node.await_(lambda: node.list_reports()[1:] == [EndReport(is_prepared=True)])
    node.client.verdicts = {}
    node.await_(lambda: node.list_reports()[2:] == [EndReport()])


def test_node_without_finished_step_is_prepared(node: Node) -> None:
    """Nothing would be lost."""
    node.begin()
    node.plan()
    node.await_(lambda: node.list_reports() == [EndReport(is_prepared=True)])


def test_node_without_snapshots_reports_nothing(tmp_path: Path) -> None:
    """Newcomers do not wait for it."""
    with contextlib.closing(Node(tmp_path, "off")) as node:
        node.begin()
        node.page.finish_step(0, 7)
        node.plan()
        node.await_(lambda: node.until_ms > 0)
        time.sleep(0.02)
        assert not node.list_reports()


def add(judge: EndJudge, node: str, report: EndReport) -> None:
    """Let a member report."""
    judge.add(node, Fact(ENDS.name, GENERATION, encode_body(report)), 0.0)


def test_leader_plans_an_end_for_a_drained_member_and_for_newcomers() -> None:
    """Newcomers that stay away are forgotten; a drained member is not."""
    judge = EndJudge(Scope(GENERATION, ("n0", "n1"), "n0", NODE_TIMEOUT_S))
    assert judge.judge(0.0) == Judgment()
    judge.expect_newcomers(0.0, are_expected=True)
    assert judge.judge(0.0).body == PLANNED
    judge.expect_newcomers(1.0, are_expected=False)
    assert judge.judge(1.0) == Judgment()
    add(judge, "n1", EndReport(is_drained=True))
    assert judge.judge(1.0) == Judgment(PLANNED)


def test_newcomers_wait_until_the_members_are_prepared_and_not_for_ever() -> None:
    """They wait two heartbeats for reports."""
    judge = EndJudge(Scope(GENERATION, ("n0", "n1"), "n0", NODE_TIMEOUT_S))
    judge.expect_newcomers(10.0, are_expected=True)
    assert [judge.judge(t).delays_newcomers for t in (10.0, 11.9, 12.0)] == [True, True, False]
    add(judge, "n0", EndReport(is_prepared=False))
    assert [judge.judge(10.0 + t).delays_newcomers for t in (2.0, MAX_DELAY_S)] == [True, False]
    add(judge, "n0", EndReport(is_prepared=True))
    assert [judge.judge(t).delays_newcomers for t in (10.0, 11.9, 12.0)] == [True, True, False]
    add(judge, "n1", EndReport(is_prepared=True))
    assert not judge.judge(10.0).delays_newcomers
