"""The leader's comparison of replicas while they train.

Each heartbeat brings at most one digest of a node's state: (generation, step, digest). If digests of one step
differ, the leader decides when all members have sent theirs of that step, or by a majority after a node
timeout. It sends the result to every member, and the job ends.

Nodes do not all digest the same steps. Without a majority the leader waits for a step that shows one, because
diverged replicas stay different. After `MAJORITY_NODE_TIMEOUTS` it gives up, and no node is named. A view
that ends earlier is not judged: nodes compare what they resume from before their first step.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_resume.policy.digests import Digest, find_diverged_nodes
from elastic_resume.policy.failure_classification import DIVERGENCE, Failure
from elastic_resume.policy.restart import ReplicasDiffer
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

    def handle_view_started(self, view: View) -> None:
        """Start the comparison of a new view."""
        self.reset()
        self.view = view

    def reset(self) -> None:
        """End the comparison, because no view runs or the job ends."""
        self.view, self.diverged_since, self.agreed_step = None, None, 0
        self.digests_by_step.clear()

    def add_digest(self, incarnation: Incarnation, state_digest: StateDigest | None) -> None:
        """Add the digest of a heartbeat."""
        view = self.view
        if state_digest is None or view is None or view.rank(incarnation) is None:
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

    def advance(self) -> None:
        """End the job when enough is known of a difference."""
        if self.view is None or self.diverged_since is None:
            return
        members, timeout_s = len(self.view.members), self.state.settings.node_timeout_s
        waited_s = self.state.now - self.diverged_since
        diverged_steps = [step for step, groups in sorted(self.digests_by_step.items()) if len(groups) > 1]
        for step in diverged_steps:
            sizes = [len(group) for group in self.digests_by_step[step].values()]
            has_majority = 2 * max(sizes) > members and waited_s >= timeout_s
            if has_majority or sum(sizes) >= members:
                self._report_divergence(self.view, step)
                return
        if waited_s >= MAJORITY_NODE_TIMEOUTS * timeout_s:
            self._report_divergence(self.view, diverged_steps[0])

    def _report_divergence(self, view: View, step: int) -> None:
        groups = [
            [member.node for member in view.members if member in group]  # names in rank order
            for group in self.digests_by_step[step].values()
        ]
        verdict = find_diverged_nodes(groups, len(view.members), step=step, agreed_step=self.agreed_step)
        report = ReplicasDiverged(view.generation, verdict)
        for peer in self.peers:
            if peer.disconnected_at is None:
                self.send(peer, report)
        self.state.effects.append(report)
        # Recorded as a failure of each wrong node, so that it is the root cause of the job's end.
        for member in view.members:
            if member.node in verdict.diverged:
                failure = Failure(DIVERGENCE, member.node, None, step=step)
                self.state.record_failure_report(member, FailureReport(view.generation, failure))
        self.state.job_failure = ReplicasDiffer(verdict)
        self.reset()
