"""The leader's comparison of replicas while they train.

Each heartbeat brings at most one digest of a node's state: (generation, step, digest). If digests of one step
differ, the leader decides when all members have sent theirs of that step, or by a majority after a node
timeout. It sends the result to every member. By its setting the job then ends, or the view restarts and the
nodes outside a strict majority take the majority's state.

Nodes do not all digest the same steps. Without a majority the leader waits for a step that shows one, because
diverged replicas stay different. After `MAJORITY_NODE_TIMEOUTS` it gives up, and the job ends with no node
named. A view that ends earlier is not judged: nodes compare what they resume from before their first step.
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
from elastic_resume.rendezvous.core.messages import FailureReport, Message, ReplicasDiverged, StateDigest
from elastic_resume.rendezvous.core.peers import Peer, PeerTable
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.world import Incarnation, View

MAX_STEPS_KEPT = 64  # steps without digests of all members: 20 s with a heartbeat every 0.3 s
MAJORITY_NODE_TIMEOUTS = 20  # wait this long for a step that shows which node is wrong: one minute


class DivergenceDetector:
    """Compares the replicas of one leader's views."""

    def __init__(self, state: NodeState, peers: PeerTable, send: Callable[[Peer, Message], None]) -> None:
        """`send` sends a message to a follower."""
        self.state = state
        self.peers = peers
        self.send = send
        self.view: View | None = None
        self.agreed_step = 0
        self.digests_by_step: dict[int, dict[Digest, set[Incarnation]]] = {}
        self.diverged_since: float | None = None
        self.divergence: ReplicasDiverged | None = None  # resent to nodes that reconnect before the next view

    def handle_view_started(self, view: View) -> None:
        """Start the comparison of a new view."""
        self.reset()
        self.view, self.divergence = view, None

    def reset(self) -> None:
        """End the comparison, because no view runs."""
        self.view, self.diverged_since, self.agreed_step = None, None, 0
        self.digests_by_step.clear()

    def add_digest(self, incarnation: Incarnation, state_digest: StateDigest | None) -> None:
        """Add the digest of a heartbeat."""
        view = self.view
        if state_digest is None or view is None or self.divergence or view.rank(incarnation) is None:
            return
        if state_digest.generation != view.generation or state_digest.step <= self.agreed_step:
            return
        groups = self.digests_by_step.setdefault(state_digest.step, {})
        groups.setdefault(state_digest.digest, set()).add(incarnation)
        if len(groups) > 1 and self.diverged_since is None:
            self.diverged_since = self.state.now
        elif len(groups[state_digest.digest]) == len(view.members) and self.diverged_since is None:
            self.agreed_step = state_digest.step
            self.digests_by_step = {
                step: groups for step, groups in self.digests_by_step.items() if step > state_digest.step
            }
        if len(self.digests_by_step) > MAX_STEPS_KEPT:
            oldest, next_oldest, *_ = sorted(self.digests_by_step)  # keep the first step with a difference
            del self.digests_by_step[oldest if len(self.digests_by_step[oldest]) == 1 else next_oldest]

    def advance(self) -> str:
        """Decide when enough is known; return why the view has to restart, or an empty text."""
        if self.view is None or self.diverged_since is None or self.divergence:
            return ""
        members, timeout_s = len(self.view.members), self.state.settings.node_timeout_s
        waited_s = self.state.now - self.diverged_since
        diverged_steps = [step for step, groups in sorted(self.digests_by_step.items()) if len(groups) > 1]
        for step in diverged_steps:
            sizes = [len(group) for group in self.digests_by_step[step].values()]
            has_majority = 2 * max(sizes) > members and waited_s >= timeout_s
            if has_majority or sum(sizes) >= members:
                return self._report_divergence(self.view, step)
        if waited_s >= MAJORITY_NODE_TIMEOUTS * timeout_s:
            return self._report_divergence(self.view, diverged_steps[0])
        return ""

    def _report_divergence(self, view: View, step: int) -> str:
        groups = [
            [member.node for member in view.members if member in group]  # names in rank order
            for group in self.digests_by_step[step].values()
        ]
        verdict = find_diverged_nodes(groups, len(view.members), step=step, agreed_step=self.agreed_step)
        continues = bool(verdict.diverged) and self.state.settings.resume_from_majority
        self.divergence = ReplicasDiverged(view.generation, verdict, continues)
        for peer in self.peers:
            if peer.disconnected_at is None:
                self.send(peer, self.divergence)
        self.state.effects.append(self.divergence)
        # Recorded as a failure of each wrong node, so that a node which diverges repeatedly is excluded.
        text = f"held another state at step {step} than the majority of nodes"
        for member in view.members:
            if member.node in verdict.diverged:
                failure = Failure(DIVERGENCE, member.node, None, text, step=step)
                self.state.record_failure_report(member, FailureReport(view.generation, failure))
        if continues:
            return summarize_divergence(verdict)
        self.state.job_failure = describe_divergence(verdict)
        return ""

    def resend_divergence(self, peer: Peer) -> None:
        """Send the result again to a wrong node that has reconnected and may have missed it."""
        result = self.divergence
        if result and result.continues_from_majority and peer.incarnation.node in result.verdict.diverged:
            self.send(peer, result)
