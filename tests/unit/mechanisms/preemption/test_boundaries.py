"""Test an agent's announcer and its ranks' observers together, over their page, without a job."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_resume import constants
from elastic_resume.errors import ElasticResumeError
from elastic_resume.mechanisms.mechanism import decode_body, encode_body
from elastic_resume.mechanisms.preemption import boundaries, notice_page
from elastic_resume.mechanisms.preemption.announcer import CAUSE, Announcer
from elastic_resume.mechanisms.preemption.boundaries import BoundaryObserver
from elastic_resume.mechanisms.preemption.judge import (
    MIN_HELD_S,
    NOTICES,
    VOID_NODE_TIMEOUTS,
    NoticeReport,
    NoticeVerdict,
    find_held_limit_s,
)
from elastic_resume.mechanisms.preemption.notice import Preemption
from elastic_resume.mechanisms.preemption.notice_page import NoticePage
from elastic_resume.mechanisms.preemption.sources import PreemptionNotice
from elastic_resume.rendezvous.facts import Fact
from tests.support.agent_parts import make_agent_context

GENERATION = 3
EVENT = {"reason": "SIGTERM", "node": "n1", "seconds": 9.0}


class Node:
    """An announcer whose leader is the test, and observers of its ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.causes: list[str] = []
        self.events: list[dict[str, Any]] = []
        committer = SimpleNamespace(last_commit_s=0.0)
        settings = {"preemption_notice": None}
        context = make_agent_context(
            workers=2, drain=self.causes.append, settings=settings, committer=committer
        )
        self.client: Any = Mock(verdicts={}, node="n1")
        self.client.wait_for_verdicts.side_effect = self.wait
        monkeypatch.setenv(constants.ENV_NOTICE_PAGE, "")
        monkeypatch.setenv(constants.ENV_AGENT_PID, str(os.getpid()))
        monkeypatch.setenv(constants.ENV_GRACE, "30")
        self.announcer = Announcer(context)
        self.announcer.start(self.client)
        self.begin(monkeypatch, GENERATION)

    def begin(self, monkeypatch: pytest.MonkeyPatch, generation: int) -> None:
        """Begin a generation of new workers."""
        self.announcer.begin_generation(Mock(generation=generation))
        monkeypatch.setenv(constants.ENV_GENERATION, str(generation))
        self.observers = [self.observe(local_rank) for local_rank in range(2)]

    def observe(self, local_rank: int) -> BoundaryObserver:
        """Make a rank's observer."""

        def emit(kind: str, **fields: Any) -> None:
            self.events.append({"event": kind, **fields})

        observer = boundaries.observe(Mock(local_rank=local_rank, emit=emit))
        assert observer is not None
        return observer

    def wait(self, known: object, timeout_s: float) -> object:
        """Stand for the client's method."""
        del known
        time.sleep(min(timeout_s, 0.001))
        return self.client.verdicts

    def send(self, verdict: NoticeVerdict, generation: int = GENERATION) -> None:
        """Send a verdict, as the leader does."""
        self.client.verdicts = {NOTICES.name: Fact(NOTICES.name, generation, encode_body(verdict))}
        self.announcer.update(self.client)

    def take_report(self) -> NoticeReport | None:
        """Return the newest report since the last call."""
        calls = self.client.send_fact.call_args_list
        found = decode_body(NoticeReport, calls[-1].args[2]) if calls else None
        calls.clear()
        return found

    def step(self, count: int = 1) -> None:
        """Let each rank pass so many step boundaries."""
        for _ in range(count):
            for observer in self.observers:
                observer.end_step(0)

    def find(self) -> list[Preemption | None]:
        """Return what the ranks know."""
        return [observer.find_notice() for observer in self.observers]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Make a node, and close it."""
    made = Node(monkeypatch)
    with contextlib.closing(made.announcer):
        yield made


def test_unused_notices_send_nothing_and_delay_no_drain(node: Node) -> None:
    """Neither a signal nor a cloud's notice."""
    node.step(3)
    node.announcer.update(node.client)
    node.announcer.begin_stop("SIGTERM")
    node.announcer._on_notice(PreemptionNotice("soon"))
    assert node.take_report() is None
    assert node.causes == [CAUSE]
    assert node.observers[0].may_end(time.monotonic())


def test_ranks_get_the_notice_at_the_agreed_boundary(node: Node) -> None:
    """One rank asks; the other gets it too. A rank that comes to its limit earlier is held."""
    node.step(3)
    node.observers[1].ask()
    node.announcer.update(node.client)
    assert node.take_report() == NoticeReport(is_used=True)
    node.send(NoticeVerdict())
    assert not node.observers[0].may_end(time.monotonic())
    node.announcer.begin_stop("SIGTERM")
    report = node.take_report()
    assert report is not None
    assert (report.reason, report.seconds, report.patience > 0, report.bound) == ("SIGTERM", 30.0, True, 0)
    node.observers[1].end_step(0)
    node.send(NoticeVerdict("n1", "SIGTERM", 2))
    report = node.take_report()
    assert report is not None
    assert report.bound == 5, "one rank has been at 4 boundaries, and may not have looked after the last"
    node.observers[0].end_step(0)
    node.step()
    assert [observer.is_held() for observer in node.observers] == [False, False]
    node.observers[0].end_step(0)
    assert node.observers[0].is_held(), "it has seen the notice at boundary 4"
    node.send(NoticeVerdict("n1", "SIGTERM", 2, 7, 9.0))
    assert not node.observers[0].is_held()
    node.observers[1].end_step(0)
    assert node.find() == [None, None]
    assert not node.observers[0].may_end(time.monotonic())
    node.step()
    assert node.find() == [Preemption("SIGTERM", "n1", 9.0)] * 2
    assert node.events == [{"event": "preemption", **EVENT}]
    assert node.observers[0].may_end(time.monotonic())


def test_void_notice_holds_no_rank_and_no_drain(node: Node) -> None:
    """No rank gets it, then or later."""
    node.send(NoticeVerdict("n1", "SIGTERM", 1))
    node.step(2)
    assert [observer.is_held() for observer in node.observers] == [True, True]
    node.send(NoticeVerdict("n1", "SIGTERM", 1, is_void=True))
    assert [observer.is_held() for observer in node.observers] == [False, False]
    node.step(20)
    assert node.find() == [None, None]
    assert node.observers[0].may_end(time.monotonic())


def test_rank_that_waits_in_vain_fails_and_never_goes_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may have the notice, which this one's agent has not passed on."""
    node.send(NoticeVerdict("n1", "SIGTERM", 1))
    node.step(2)
    assert node.observers[0].is_held()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + MIN_HELD_S - 1)
    assert node.observers[0].is_held()
    monkeypatch.setattr(time, "monotonic", lambda: now + MIN_HELD_S)
    with pytest.raises(ElasticResumeError, match="has waited 60 s for the step at which all ranks") as caught:
        node.observers[0].is_held()
    assert not caught.value.is_deterministic, "so the job restarts"


def test_wait_outlasts_the_time_until_a_notice_is_void() -> None:
    """Also with a long node timeout."""
    for node_timeout_s in (0.5, 3.0, 60.0, 3600.0):
        assert find_held_limit_s(node_timeout_s) > VOID_NODE_TIMEOUTS * node_timeout_s


def test_cloud_notice_drains_when_all_ranks_are_past_the_boundary(node: Node) -> None:
    """At that boundary a hook may still run, and the script acts before the next one."""
    node.send(NoticeVerdict())
    node.announcer._on_notice(PreemptionNotice("EC2 will stop it", time.time() + 120.0))
    report = node.take_report()
    assert report is not None
    assert report.reason == "EC2 will stop it"
    assert 100.0 < report.seconds <= 120.0
    node.send(NoticeVerdict("n1", "EC2 will stop it", 1))
    node.send(NoticeVerdict("n1", "EC2 will stop it", 1, 2, 9.0))
    node.step(2)
    node.observers[0].end_step(0)
    node.announcer.update(node.client)
    assert node.causes == []
    node.observers[1].end_step(0)
    node.announcer.update(node.client)
    node.announcer.update(node.client)
    assert node.causes == [CAUSE]


@pytest.mark.parametrize("end", ["deadline", "void", "generation"])
def test_cloud_notice_drains_without_an_agreed_boundary(
    node: Node, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """At its deadline less a drain's time, or when no notice comes any more."""
    node.send(NoticeVerdict())
    node.announcer._on_notice(PreemptionNotice("soon", time.time() + (0.0 if end == "deadline" else 3600.0)))
    assert node.causes == ([CAUSE] if end == "deadline" else [])
    if end == "void":
        node.send(NoticeVerdict("n1", "soon", 1, is_void=True))
    elif end == "generation":
        node.begin(monkeypatch, GENERATION + 1)
    assert node.causes == [CAUSE]


def test_next_generation_has_no_notice(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict of the one before is passed over, and its ranks are held no more."""
    node.send(NoticeVerdict("n1", "SIGTERM", 1))
    node.step(2)
    old = node.observers
    node.begin(monkeypatch, GENERATION + 1)
    assert not old[0].is_held()
    node.announcer.update(node.client)
    node.step(3)
    assert [observer.is_held() for observer in node.observers] == [False, False]
    assert node.find() == [None, None]


def test_worker_without_an_agent_of_its_own_observes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of another agent, of an ended one, and none."""
    monkeypatch.setenv(constants.ENV_AGENT_PID, str(os.getpid()))
    monkeypatch.setenv(constants.ENV_GENERATION, "1")
    for path in ("", f"/proc/{os.getppid()}/fd/3", f"/proc/{os.getpid()}/fd/999999"):
        monkeypatch.setenv(constants.ENV_NOTICE_PAGE, path)
        assert boundaries.observe(Mock()) is None


class RecordedWords:
    """Words whose accesses are recorded."""

    def __init__(self, words: Any, log: list[str]) -> None:
        self._words, self._log = words, log

    def __getitem__(self, index: int) -> Any:
        self._log.append(f"load {index}")
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._log.append(f"store {index}")
        self._words[index] = value


def test_barrier_is_between_the_store_and_the_load_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an agent and a rank may miss each other, and a rank pass the agreed boundary."""
    page = NoticePage.create(1, 60)
    with contextlib.closing(page):
        log: list[str] = []
        page._words = RecordedWords(page._words, log)
        monkeypatch.setattr(notice_page, "barrier", lambda: log.append("barrier"))
        patience, count = "2", "9"
        page.count(0, 1, 5)
        at = log.index("barrier")
        assert log.index(f"store {count}") < at < log.index(f"load {patience}")
        log.clear()
        page.announce(3)
        at = log.index("barrier")
        assert log.index(f"store {patience}") < at < log.index("load 0")
        log.clear()
        page.agree(5, b"{}")
        assert log == ["barrier", "store 3"], "the text is complete before the boundary is there"
