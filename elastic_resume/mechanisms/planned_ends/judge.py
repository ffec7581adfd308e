"""Tell all nodes of a view that it is to end, because a member is drained or newcomers are about to join."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.mechanisms.mechanism import decode_body, encode_body
from elastic_resume.rendezvous.facts import Fact, Judge, Judgment, Scope, Topic


@dataclass(frozen=True, slots=True)
class PlannedEnd:
    """That a member is drained; from the leader, that its view is to end."""

    is_planned: bool


class EndJudge(Judge):
    """Keeps why the view is to end. A drained node leaves, sooner or later; newcomers may not join."""

    def __init__(self, scope: Scope) -> None:
        del scope
        self._is_drained = self._has_newcomers = False

    def add(self, node: str, fact: Fact, now: float) -> None:
        """Note that a member is drained."""
        del node, now
        self._is_drained |= decode_body(PlannedEnd, fact.body).is_planned

    def expect_newcomers(self, *, are_expected: bool) -> None:
        """See `Judge`."""
        self._has_newcomers = are_expected

    def judge(self, now: float) -> Judgment:
        """Return what all nodes have to know; nothing while no end is planned."""
        del now
        if not (self._is_drained or self._has_newcomers):
            return Judgment()
        return Judgment(encode_body(PlannedEnd(is_planned=True)))


PLANNED_ENDS = Topic("planned-ends", EndJudge, is_urgent=True)
