"""Tell all nodes of a view that it is to end, because a member is drained or newcomers are about to join.

The view ends for newcomers only when its members have a snapshot of the newest step: see
`EndReport.is_prepared`.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.mechanisms.mechanism import decode_body
from elastic_resume.rendezvous.facts import Fact, FactBody, Judge, Judgment, Scope, Topic

ANNOUNCEMENT_NODE_TIMEOUTS = 0.2
"""Two heartbeats: a fact is sent at once, and each node gets the verdict in the answer to its next one."""
PLANNED = FactBody("true")
"""The verdict; there is none while no end is planned."""
MAX_DELAY_S = 60.0
"""Newcomers wait no longer for a member that takes no step, as in an evaluation."""


@dataclass(frozen=True, slots=True)
class EndReport:
    """What a member knows of the end of its view."""

    is_drained: bool = False
    is_prepared: bool | None = None
    """Whether it has a snapshot of the newest step, and takes one of each. None: no end is planned, or it
    takes no snapshots."""


class EndJudge(Judge):
    """Keeps why the view is to end. A drained node leaves, sooner or later; newcomers may not join."""

    def __init__(self, scope: Scope) -> None:
        self._members = frozenset(scope.members)
        self._announcement_s = ANNOUNCEMENT_NODE_TIMEOUTS * scope.node_timeout_s
        self._reports: dict[str, EndReport] = {}
        self._expected_at: float | None = None

    def add(self, node: str, fact: Fact, now: float) -> None:
        """Keep the newest report of a member."""
        del now
        self._reports[node] = decode_body(EndReport, fact.body)

    def expect_newcomers(self, now: float, *, are_expected: bool) -> None:
        """See `Judge`."""
        self._expected_at = now if are_expected else None

    def judge(self, now: float) -> Judgment:
        """Return what all nodes have to know, and whether newcomers wait; nothing while no end is planned."""
        reports = self._reports.values()
        if self._expected_at is None and not any(report.is_drained for report in reports):
            return Judgment()
        return Judgment(PLANNED, delays_newcomers=self._must_wait(now))

    def _must_wait(self, now: float) -> bool:
        if self._expected_at is None:
            return False
        if any(report.is_prepared is False for report in self._reports.values()):
            return now < self._expected_at + MAX_DELAY_S
        have_all_reported = self._reports.keys() >= self._members
        return not have_all_reported and now < self._expected_at + self._announcement_s


ENDS = Topic("planned-ends", EndJudge, is_urgent=True)
