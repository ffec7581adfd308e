"""Compare the replicas of a view while they train. The leader owns this pure object.

Each heartbeat brings at most one digest of a node's state: (generation, step, digest). If digests of one step
differ, the leader decides once all members have sent theirs of that step. After a node timeout, a majority
suffices. The leader sends the verdict to every member and ends the job. It changes no membership.

Nodes do not all digest the same steps. Without a majority the leader waits for a step that has one, because
diverged replicas stay different. After `MAJORITY_NODE_TIMEOUTS` no node is named. A view that ends earlier is
not judged: nodes compare what they resume from before their first step.
"""

from __future__ import annotations

from elastic_resume.policy.digests import (
    Digest,
    DivergenceVerdict,
    choose_common_step,
    find_diverged_nodes,
)
from elastic_resume.rendezvous.core.messages import StateDigest
from elastic_resume.rendezvous.core.world import Incarnation

MAX_STEPS_KEPT = 64  # steps without digests of all members: 20 s with a heartbeat every 0.3 s
MAJORITY_NODE_TIMEOUTS = 20  # wait this long for a step that shows which node is wrong: one minute


class DigestQueue:
    """The digest that a node sends with its next heartbeat; of two steps, the one that more nodes digest."""

    def __init__(self) -> None:
        self._next: StateDigest | None = None

    def add(self, digest: StateDigest) -> None:
        """Add a digest of the running generation."""
        kept = self._next
        if (
            kept is None
            or kept.generation != digest.generation
            or choose_common_step(digest.step, kept.step) == digest.step
        ):
            self._next = digest

    def take(self) -> StateDigest | None:
        """Return the digest, once."""
        digest, self._next = self._next, None
        return digest


class ReplicaComparison:
    """Compares the replicas of one view after another."""

    def __init__(self, node_timeout_s: float) -> None:
        self.node_timeout_s = node_timeout_s
        self.digests_by_step: dict[int, dict[Digest, set[Incarnation]]] = {}
        self.reset()

    def reset(self, members: tuple[Incarnation, ...] = ()) -> None:
        """Compare the members of a new view; without any, nothing."""
        self.members = members
        self.agreed_step = 0
        self.diverged_since: float | None = None
        self.digests_by_step.clear()

    def add(self, node: Incarnation, digest: StateDigest, now: float) -> None:
        """Add the digest of a member's heartbeat."""
        if digest.step <= self.agreed_step or not self.members:
            return
        groups = self.digests_by_step.setdefault(digest.step, {})
        groups.setdefault(digest.digest, set()).add(node)
        if len(groups) > 1 and self.diverged_since is None:
            self.diverged_since = now
        elif len(groups[digest.digest]) == len(self.members) and self.diverged_since is None:
            self.agreed_step = digest.step
            self.digests_by_step = {
                step: groups for step, groups in self.digests_by_step.items() if step > digest.step
            }
        if len(self.digests_by_step) > MAX_STEPS_KEPT:
            oldest, next_oldest, *_ = sorted(self.digests_by_step)  # keep the first step with a difference
            del self.digests_by_step[oldest if len(self.digests_by_step[oldest]) == 1 else next_oldest]

    def find_verdict(self, now: float) -> DivergenceVerdict | None:
        """Return the verdict, once, when enough is known of a difference."""
        if self.diverged_since is None:
            return None
        waited_s = now - self.diverged_since
        diverged_steps = [step for step, groups in sorted(self.digests_by_step.items()) if len(groups) > 1]
        for step in diverged_steps:
            sizes = [len(group) for group in self.digests_by_step[step].values()]
            has_majority = 2 * max(sizes) > len(self.members) and waited_s >= self.node_timeout_s
            if has_majority or sum(sizes) >= len(self.members):
                return self._judge(step)
        if waited_s >= MAJORITY_NODE_TIMEOUTS * self.node_timeout_s:
            return self._judge(diverged_steps[0])
        return None

    def _judge(self, step: int) -> DivergenceVerdict:
        groups = [
            [member.node for member in self.members if member in group]  # names in rank order
            for group in self.digests_by_step[step].values()
        ]
        verdict = find_diverged_nodes(groups, len(self.members), step=step, agreed_step=self.agreed_step)
        self.reset()
        return verdict
