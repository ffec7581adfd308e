"""The leader's comparison of the digests that members of its world send with their heartbeats.

Each heartbeat brings at most one digest (generation, step, digest). Where digests of one step differ, the
leader decides as soon as all members have sent theirs of that step, or a node timeout later by a majority. It
tells every member. By the setting of this leader the job then ends, or the world restarts and those outside a
strict majority take the majority's state.

Not all nodes digest every step that some do. Without a majority the leader waits for a step that shows one,
since replicas that came apart stay so; after `DOUBT_TIMEOUTS` it gives up, and the job ends with nobody
named. A world that ends before that is not judged: what nodes resume from is compared before their first
step.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_resume.policy.divergence import (
    Digest,
    describe_divergence,
    find_diverged_nodes,
    summarize_divergence,
)
from elastic_resume.policy.failure_classification import DIVERGENCE, Failure
from elastic_resume.rendezvous.core.events import ReportDivergence
from elastic_resume.rendezvous.core.messages import FailureReport, Message, ReplicasDiverged, StateDigest
from elastic_resume.rendezvous.core.peers import Peer, PeerTable
from elastic_resume.rendezvous.core.quorum import Incarnation, View
from elastic_resume.rendezvous.core.state import NodeState

MAX_STEPS_KEPT = 64
"""Of those at which not all members are known to be equal; with a heartbeat of 0.3 s, 20 s of them."""
MAJORITY_NODE_TIMEOUTS = 20
"""So many node timeouts a leader waits for a step that shows who is wrong: a minute."""


class DivergenceDetector:
    """Compares the replicas of one leader's worlds."""

    def __init__(self, state: NodeState, peers: PeerTable, send: Callable[[Peer, Message], None]) -> None:
        """``tell`` sends a message to a follower."""
        self.state = state
        self.peers = peers
        self.send = send
        self.view: View | None = None
        self.agreed_step = 0
        self.digests_by_step: dict[int, dict[Digest, set[Incarnation]]] = {}
        self.diverged_since: float | None = None
        self.divergence: ReplicasDiverged | None = None
        """What those who come back before the next world begins must hear, should they have missed it."""

    def handle_view_installed(self, view: View) -> None:
        """A world runs: nothing is known of it."""
        self.reset()
        self.view, self.divergence = view, None

    def reset(self) -> None:
        """No world runs."""
        self.view, self.diverged_since, self.agreed_step = None, None, 0
        self.digests_by_step.clear()

    def add_digest(self, incarnation: Incarnation, state_digest: StateDigest | None) -> None:
        """Take in the digest that a heartbeat brought."""
        world = self.view
        if (
            state_digest is None
            or world is None
            or self.divergence is not None
            or world.rank(incarnation) is None
        ):
            return
        if state_digest.generation != world.generation or state_digest.step <= self.agreed_step:
            return
        camps = self.digests_by_step.setdefault(state_digest.step, {})
        camps.setdefault(state_digest.digest, set()).add(incarnation)
        if len(camps) > 1 and self.diverged_since is None:
            self.diverged_since = self.state.now
        elif len(camps[state_digest.digest]) == len(world.members) and self.diverged_since is None:
            self.agreed_step = state_digest.step
            self.digests_by_step = {
                step: camps for step, camps in self.digests_by_step.items() if step > state_digest.step
            }
        if len(self.digests_by_step) > MAX_STEPS_KEPT:
            oldest, next_oldest, *_ = sorted(self.digests_by_step)  # of steps that differ the first one stays
            del self.digests_by_step[oldest if len(self.digests_by_step[oldest]) == 1 else next_oldest]

    def advance(self) -> str:
        """Judge when enough is known; return why the world is to restart, or nothing."""
        if self.view is None or self.diverged_since is None or self.divergence is not None:
            return ""
        members, timeout_s = len(self.view.members), self.state.settings.node_timeout_s
        waited_s = self.state.now - self.diverged_since
        unequal = [step for step, camps in sorted(self.digests_by_step.items()) if len(camps) > 1]
        for step in unequal:
            sizes = [len(camp) for camp in self.digests_by_step[step].values()]
            is_clear = 2 * max(sizes) > members and waited_s >= timeout_s
            if is_clear or sum(sizes) >= members:
                return self._report_divergence(self.view, step)
        return (
            self._report_divergence(self.view, unequal[0])
            if waited_s >= MAJORITY_NODE_TIMEOUTS * timeout_s
            else ""
        )

    def _report_divergence(self, view: View, step: int) -> str:
        camps = [
            [one.node for one in view.members if one in camp]  # in rank order
            for camp in self.digests_by_step[step].values()
        ]
        verdict = find_diverged_nodes(camps, len(view.members), step=step, agreed_step=self.agreed_step)
        goes_on = bool(verdict.diverged) and self.state.settings.resume_from_majority
        self.divergence = ReplicasDiverged(view.generation, verdict, goes_on)
        for part in self.peers:
            if part.disconnected_at is None:
                self.send(part, self.divergence)
        self.state.effects.append(ReportDivergence(self.divergence))
        # It counts as a failure of the wrong nodes: one that goes on being wrong is left out.
        text = f"held another state at step {step} than the majority of nodes"
        for who in view.members:
            if who.node in verdict.diverged:
                failure = Failure(DIVERGENCE, who.node, None, text, step=step)
                self.state.record_failure_report(who, FailureReport(view.generation, failure))
        if goes_on:
            return summarize_divergence(verdict)
        self.state.job_failure = describe_divergence(verdict)
        return ""

    def resend_divergence(self, peer: Peer) -> None:
        """Say it again to one that is back: its link may have broken over it."""
        if (
            self.divergence is not None
            and self.divergence.continues_from_majority
            and peer.incarnation.node in self.divergence.verdict.diverged
        ):
            self.send(peer, self.divergence)
