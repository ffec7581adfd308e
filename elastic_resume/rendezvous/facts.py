"""Carry facts of the nodes to the leader, and its verdicts to all nodes. Both are opaque to the core.

A fact is what one node knows about one *topic*; its body is a text that only the topic's judge reads. The
newest fact of each topic goes up with the next heartbeat of its node. A leader hands it to the judge of its
topic, and sends the verdicts with its heartbeats. A topic that no leader or follower knows is passed over.

A fact belongs to a generation: a judge lives as long as its view, and gets only what members of that view say
of its generation. Facts of generation 0 belong to the job; their judge lives as long as its leader.

A judgment may ask the core to end the view, to keep two nodes out of one view, or to fail the job. All else
is for the agents, which read the newest verdicts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NewType

from elastic_resume.policy.failure_classification import Failure
from elastic_resume.policy.reasons import ViewEndReason
from elastic_resume.policy.restart import JobFailure

MAX_BODY_CHARS = 1 << 16
FactBody = NewType("FactBody", str)  # JSON of at most `MAX_BODY_CHARS`


@dataclass(frozen=True, slots=True)
class Fact:
    """What a node knows about a topic in a generation; from the leader, its verdict. Generation 0: always."""

    topic: str
    generation: int
    body: FactBody


@dataclass(frozen=True, slots=True)
class Judgment:
    """What a judge has found: `body` for all nodes (empty: no newer one), and what it asks of the core."""

    body: FactBody = FactBody("")
    job_failure: JobFailure | None = None
    """Fail the job."""
    root_causes: tuple[Failure, ...] = ()
    """Failures of members, to be recorded."""
    view_end: ViewEndReason | None = None
    """End the running view."""
    apart: frozenset[frozenset[str]] = frozenset()
    """Pairs of nodes of which no view may have both."""
    delays_newcomers: bool = False
    """Do not end the running view for newcomers yet."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a judge judges: the view of a generation, or the job if that is 0."""

    generation: int
    members: tuple[str, ...]
    """The nodes of the view in rank order."""
    leader: str
    node_timeout_s: float
    last_body: FactBody = FactBody("")
    """Of a topic of the job: the verdict of the last leader."""


class Judge:
    """Judges the facts of one topic. Pure: the time is an argument, in seconds."""

    def add(self, node: str, fact: Fact, now: float) -> None:
        """Take the newest fact of a node; raise ValueError if its body is malformed."""

    def judge(self, now: float) -> Judgment:
        """Return the verdict; it is called after each fact, and several times in a node timeout."""
        del now
        return Judgment()

    def start_view(self, generation: int, members: tuple[str, ...]) -> None:
        """Note the view of a job's judge, or that none runs: then there are no members."""

    def expect_newcomers(self, now: float, *, are_expected: bool) -> None:
        """Note that the view will end soon because newcomers join, or that it will not."""

    def remove(self, node: str) -> None:
        """Forget a node that is lost."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic of a job's facts."""

    name: str
    make_judge: Callable[[Scope], Judge]
    choose: Callable[[FactBody, FactBody], FactBody] = lambda _, newest: newest
    """Which of two facts of one generation goes with the next heartbeat."""
    is_of_job: bool = False
    """All nodes that follow send such facts, at once. Facts of a view come from its members, with heartbeats.

    A verdict about the job stays known until the next one with a body: the next leader may know less.
    """
    is_urgent: bool = False
    """Members send such facts at once too."""


class FactOutbox:
    """The newest fact of each topic on one node, and which of them the leader has not received."""

    def __init__(self, topics: Iterable[Topic]) -> None:
        self._topics = {topic.name: topic for topic in topics}
        self._newest: dict[str, Fact] = {}
        self._unsent: set[str] = set()

    def add(self, fact: Fact) -> bool:
        """Send a fact, or the one that waits if its topic prefers that; return whether to send it at once."""
        topic, kept = self._topics.get(fact.topic), self._newest.get(fact.topic)
        if topic is None or (kept and kept.generation > fact.generation):
            return False
        if kept and kept.generation == fact.generation and fact.topic in self._unsent:
            fact = replace(fact, body=topic.choose(kept.body, fact.body))
        self._newest[fact.topic] = fact
        self._unsent.add(fact.topic)
        return topic.is_of_job or topic.is_urgent

    def take(self) -> tuple[Fact, ...]:
        """Return the facts to send, once."""
        facts = tuple(self._newest[topic] for topic in sorted(self._unsent)) if self._unsent else ()
        self._unsent.clear()
        return facts

    def renew(self) -> None:
        """Send all again: to another leader, or because a connection broke."""
        self._unsent.update(self._newest)


class FactBoard:
    """The judges of one leader, and their verdicts."""

    def __init__(self, topics: Iterable[Topic], known: Mapping[str, Fact], scope: Scope) -> None:
        """`known` has the verdicts of the last leader; `scope` is the job's, without a view."""
        self._topics = {topic.name: topic for topic in topics}
        self._scope = scope
        self._generation = 0
        self._members: tuple[str, ...] = ()
        self._judges: dict[str, Judge] = {}
        self.is_due = False
        """There are new facts, or it is time to look again."""
        self.apart: frozenset[frozenset[str]] = frozenset()
        self.delays_newcomers = False
        self.verdicts: dict[str, Fact] = {}
        """The newest verdict of each topic that has one. Replaced by another dictionary when one changes."""
        for name in known.keys() & {name for name, topic in self._topics.items() if topic.is_of_job}:
            self.verdicts[name] = known[name]
            self._judges[name] = self._topics[name].make_judge(replace(scope, last_body=known[name].body))

    def start_view(self, generation: int, members: tuple[str, ...]) -> None:
        """Judge the facts of a view that starts, in place of those of the view before."""
        self.end_view()
        self._generation, self._members = generation, members
        scope = replace(self._scope, generation=generation, members=members)
        self._judges |= {
            name: topic.make_judge(scope) for name, topic in self._topics.items() if not topic.is_of_job
        }
        for judge in self._judges.values():
            judge.start_view(generation, members)

    def end_view(self) -> None:
        """Drop the facts and verdicts of the view; those of the job remain."""
        self._judges = {name: judge for name, judge in self._judges.items() if self._topics[name].is_of_job}
        self.verdicts = {name: fact for name, fact in self.verdicts.items() if not fact.generation}
        self._generation, self._members = 0, ()
        self.is_due = True
        for judge in self._judges.values():
            judge.start_view(0, ())

    def expect_newcomers(self, now: float, *, are_expected: bool) -> None:
        """Note that the view will end soon because newcomers join, or that it will not."""
        for judge in self._judges.values():
            judge.expect_newcomers(now, are_expected=are_expected)
        self.is_due = True

    def remove(self, node: str) -> None:
        """Forget a node that is lost."""
        for judge in self._judges.values():
            judge.remove(node)
        self.is_due = True

    def add(self, node: str, facts: tuple[Fact, ...], now: float, *, is_member: bool) -> None:
        """Take a node's new facts; those of another generation or of an unknown topic are dropped."""
        for fact in facts:
            topic, judge = self._topics.get(fact.topic), self._judges.get(fact.topic)
            if topic is None:
                continue
            if judge is None and topic.is_of_job:  # with its first fact: most jobs use few of the topics
                judge = self._judges[fact.topic] = topic.make_judge(self._scope)
                judge.start_view(self._generation, self._members)
            if judge and (topic.is_of_job or (is_member and fact.generation == self._generation)):
                with contextlib.suppress(ValueError):  # malformed, so as good as of an unknown topic
                    judge.add(node, fact, now)
                self.is_due = True

    def judge(self, now: float) -> list[Judgment]:
        """Return what all judges find now."""
        self.is_due = False
        found = {name: judge.judge(now) for name, judge in self._judges.items()}
        verdicts = {name: fact for name, fact in self.verdicts.items() if not fact.generation}
        verdicts |= {
            name: Fact(name, 0 if self._topics[name].is_of_job else self._generation, verdict.body)
            for name, verdict in found.items()
            if verdict.body
        }
        if verdicts != self.verdicts:
            self.verdicts = verdicts
        self.delays_newcomers = any(verdict.delays_newcomers for verdict in found.values())
        self.apart = frozenset[frozenset[str]]().union(*(verdict.apart for verdict in found.values()))
        return list(found.values())
