"""Let nodes that keep views from making steps wait, so that the others train.

A view has made progress if some rank has finished a newer step than all before. Jobs that report no steps are
judged by time. The first view that a node spoils costs it nothing; each further one doubles its wait. It does
not count how the node ends a view: it dies, leaves, or loses its link. Newcomers that end one view after the
other, before it makes a step, wait longer for each other, too.

Each node keeps this record, because the next leader needs it when the node that was lost has led.
"""

from __future__ import annotations

from elastic_resume.rendezvous.core.peers import NEVER
from elastic_resume.rendezvous.core.world import Incarnation

MAX_BACKOFF_S = 300.0
MAX_BASE_S = 5.0  # of the first wait: a job with a long node timeout gets its lost nodes back as soon
PATIENCE_S = 60.0
"""A view that lasts so long counts as progress in a job that has reported no step."""
CALM_DELAYS = 4
"""Newcomers wait as little as at first again after a view that lasted for so many of their delays."""


class Backoff:
    """Which nodes have to wait, because they ended views without progress or made view changes fail."""

    def __init__(self, node_timeout_s: float) -> None:
        self._base_s = min(node_timeout_s, MAX_BASE_S)
        self._by_node: dict[str, tuple[int, float]] = {}  # a name stays, also with an empty disk
        self._suspects: dict[str, float] = {}
        """When each node ended the newest view that was started; `settle` decides whether it spoiled it."""
        self._newest_step = 0
        self._newcomers_at = NEVER
        """When the newest view was ended for newcomers."""
        self._doublings = 0
        """How often the delay of newcomers was doubled: each time that they ended a view without progress."""
        self._has_margin = False
        """The delay was doubled once more when a view made progress, so that half of the time is training."""
        self.started_at = NEVER
        """When the newest view was started."""

    def note_start(self, now: float, newest_step: int) -> None:
        """Note that a view starts, whose nodes have finished this step before."""
        if now - self.started_at >= max(PATIENCE_S, CALM_DELAYS * self.compute_scale_up_delay_s(1.0)):
            self._doublings, self._has_margin = 0, False
        self.started_at, self._newest_step = now, max(self._newest_step, newest_step)
        self._newcomers_at = NEVER

    def note_end(self, node: Incarnation, now: float) -> None:
        """Note that a node was lost, or leaves: it has ended the newest view."""
        self._suspects.setdefault(node.node, now)

    def note_newcomers(self, now: float) -> None:
        """Note that the newest view is ended for newcomers."""
        self._newcomers_at = now

    def settle(self, newest_step: int) -> None:
        """Judge the end of the newest view by the newest step that any node has finished."""
        has_newer = newest_step > self._newest_step
        patience_s = MAX_BACKOFF_S if newest_step else PATIENCE_S
        for name, ended_at in self._suspects.items():
            if ended_at < self.started_at:
                continue  # it ended an earlier view, which another leader has judged
            if has_newer or ended_at - self.started_at >= patience_s:
                self._by_node.pop(name, None)
            else:
                self._add(name, ended_at)
        self._suspects.clear()
        if self._newcomers_at > NEVER:
            lasted_s = self._newcomers_at - self.started_at
            if not has_newer and lasted_s < patience_s:
                self._doublings, self._has_margin = self._doublings + 1, False
            elif self._doublings and not self._has_margin:
                self._doublings, self._has_margin = self._doublings + 1, True
            self._newcomers_at = NEVER

    def add(self, node: Incarnation, now: float) -> None:
        """Note that a node made a change of the view fail."""
        self._add(node.node, now)

    def _add(self, name: str, now: float) -> None:
        count = self._by_node.get(name, (0, now))[0] + 1
        wait_s = min(MAX_BACKOFF_S, self._base_s * (_double(count - 1) - 1))
        self._by_node[name] = count, now + wait_s

    def remove(self, node: Incarnation) -> None:
        """Note that a view with that node has lasted."""
        self._by_node.pop(node.node, None)

    def wait_until(self, node: Incarnation) -> float:
        """Return when the node may be in the next view."""
        return self._by_node.get(node.node, (0, NEVER))[1]

    def compute_scale_up_delay_s(self, delay_s: float) -> float:
        """Return how long a view runs at least before newcomers end it; normally `delay_s`."""
        return max(delay_s, min(MAX_BACKOFF_S, delay_s * _double(self._doublings)))


def _double(times: int) -> float:
    """Return 2 to the power of ``times``; a node may end thousands of views, and a float has an end."""
    return 2.0 ** min(times, 30)
