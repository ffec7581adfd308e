"""Compare the replicas of a view while they train. The leader owns this pure object.

Each heartbeat brings at most one digest of a node's state: (step, digest). If digests of one step
differ, the leader decides once all members have sent theirs of that step. After a node timeout, a majority
suffices. The verdict ends the job, and is the reason of its end. It changes no membership.

Nodes do not all digest the same steps. Without a majority the leader waits for a step that has one, because
diverged replicas stay different. After `MAJORITY_NODE_TIMEOUTS` no node is named. A view that ends earlier is
not judged: nodes compare what they resume from before their first step.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.mechanisms.mechanism import decode_body
from elastic_resume.policy.digests import (
    DivergenceVerdict,
    choose_common_step,
    find_diverged_nodes,
    is_digest,
)
from elastic_resume.policy.failure_classification import DIVERGENCE, Failure
from elastic_resume.policy.restart import ReplicasDiffer
from elastic_resume.rendezvous.facts import Fact, FactBody, Judge, Judgment, Scope, Topic

MAX_STEPS_KEPT = 64  # steps without digests of all members: 20 s with a heartbeat every 0.3 s
MAJORITY_NODE_TIMEOUTS = 20  # wait this long for a step that shows which node is wrong: one minute


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The digest of one node's state after a step."""

    step: int
    digest: str


def choose_digest(kept: FactBody, newest: FactBody) -> FactBody:
    """Return the digest that a node sends: of two steps, the one that more nodes digest."""
    steps = [decode_body(StateDigest, body).step for body in (kept, newest)]
    return newest if choose_common_step(*steps) == steps[1] else kept


class ReplicaComparison(Judge):
    """Compares the replicas of one view."""

    def __init__(self, scope: Scope) -> None:
        self.generation, self.members, self.node_timeout_s = (
            scope.generation,
            scope.members,
            scope.node_timeout_s,
        )
        self.digests_by_step: dict[int, dict[str, set[str]]] = {}
        self.agreed_step = 0
        self.diverged_since: float | None = None

    def add(self, node: str, fact: Fact, now: float) -> None:
        """Add the digest of a member's heartbeat."""
        digest = decode_body(StateDigest, fact.body)
        if not is_digest(digest.digest):
            raise ValueError("not a digest of 32 hexadecimal digits")
        if digest.step <= self.agreed_step:
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

    def judge(self, now: float) -> Judgment:
        """End the job when enough is known of a difference.

        It is recorded as a failure of each wrong node, so that it is the root cause of the job's end.
        """
        found = self.find_difference(now)
        if found is None:
            return Judgment()
        failures = tuple(Failure(DIVERGENCE, node, None, step=found.step) for node in found.diverged)
        return Judgment(job_failure=ReplicasDiffer(found, self.generation), root_causes=failures)

    def find_difference(self, now: float) -> DivergenceVerdict | None:
        """Return how the replicas differ when enough is known."""
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
            [member for member in self.members if member in group]  # in rank order
            for group in self.digests_by_step[step].values()
        ]
        return find_diverged_nodes(groups, len(self.members), step=step, agreed_step=self.agreed_step)


DIGESTS = Topic("state-digest", ReplicaComparison, choose_digest)
