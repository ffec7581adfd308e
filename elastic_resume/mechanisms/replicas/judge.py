"""Choose the steps at which nodes hash their state, and find replicas that have diverged.

The hash of a node's state is its *digest*. Nodes have different budgets and must send digests of common
steps. So intervals are powers of two: an interval divides every larger one. If a heartbeat can carry only one
of several steps, it carries the one that is divisible by the highest power of two (`choose_common_step`).

A difference proves that a node is wrong, but not which. A strict majority of all members with equal digests
is right; every other node is wrong. Without a strict majority no node is named. The job ends in either case,
because the wrong node's gradients are in every node's average.

Each heartbeat brings at most one digest of a node's state: (step, digest). If digests of one step
differ, the leader decides once all members have sent theirs of that step. After a node timeout, a majority
suffices. The verdict ends the job, and is the reason of its end. It changes no membership.

Nodes do not all digest the same steps. Without a majority the leader waits for a step that has one, because
diverged replicas stay different. After `MAJORITY_NODE_TIMEOUTS` no node is named. A view that ends earlier is
not judged: nodes compare what they resume from before their first step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic_resume.mechanisms.mechanism import ReadingCosts, decode_body, encode_body
from elastic_resume.mechanisms.replicas.description import DivergenceVerdict, describe_divergence
from elastic_resume.policy.checkpoint_interval import MAX_OVERHEAD_SHARE, IntervalSetting
from elastic_resume.policy.failure_classification import DIVERGENCE, Failure
from elastic_resume.policy.restart import JudgedFailure
from elastic_resume.rendezvous.facts import Fact, FactBody, Judge, Judgment, Scope, Topic

MAX_STEPS_KEPT = 64  # steps without digests of all members: 20 s with a heartbeat every 0.3 s
MAJORITY_NODE_TIMEOUTS = 20  # wait this long for a step that shows which node is wrong: one minute
MAX_DIGEST_INTERVAL = 1 << 30
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The digest of one node's state after a step."""

    step: int
    digest: str
    """128 bits in lower-case hexadecimal."""


def digest_interval_steps(
    setting: IntervalSetting, *, cost_s: float | None, step_s: float | None, cores: float = 1.0
) -> int:
    """Return the steps between two digests for check-replicas; 0 means none.

    ``cost_s`` is processor seconds per digest and ``step_s`` seconds per step, None before they are measured.
    ``auto`` is the smallest power of two at which digests take at most `MAX_OVERHEAD_SHARE` of the time of
    the ``cores``. Before anything is measured it is 1, so different initial states are found at once.
    """
    if setting.is_off:
        return 0
    if setting.steps is not None:
        return setting.steps
    if cost_s is None or step_s is None or not (cost_s > 0 and step_s > 0):
        return 1
    budget_s = MAX_OVERHEAD_SHARE * step_s * max(1.0, cores)
    if not cost_s < MAX_DIGEST_INTERVAL * budget_s:
        return MAX_DIGEST_INTERVAL
    return 1 << max(0, math.ceil(cost_s / budget_s) - 1).bit_length()


def is_digest_due(step: int, interval_steps: int) -> bool:
    """Whether the snapshot of that step is digested."""
    return interval_steps > 0 and step > 0 and step % interval_steps == 0


def choose_common_step(first: int, second: int) -> int:
    """Return the step that more nodes send: the one divisible by the higher power of two, else the newer."""
    return max(first, second, key=lambda step: (step & -step, step))


def is_comparison_due(step: int, costs: ReadingCosts) -> bool:
    """Whether all nodes compare their replicas at this step."""
    cost_s = costs.read_s
    if cost_s is not None and costs.snapshot_s is not None:
        cost_s += costs.snapshot_s  # it may be taken only for the comparison
    setting = costs.settings["check_replicas"]
    gap = digest_interval_steps(setting, cost_s=cost_s, step_s=costs.step_s, cores=costs.cores)
    return is_digest_due(step, gap)


def choose_digest(kept: FactBody, newest: FactBody) -> FactBody:
    """Return the digest that a node sends: of two steps, the one that more nodes digest."""
    steps = [decode_body(StateDigest, body).step for body in (kept, newest)]
    return newest if choose_common_step(*steps) == steps[1] else kept


class ReplicaComparison(Judge):
    """Compares the replicas of one view."""

    def __init__(self, scope: Scope) -> None:
        self.generation, self.members = scope.generation, scope.members
        self.node_timeout_s = scope.node_timeout_s
        self.digests_by_step: dict[int, dict[str, set[str]]] = {}
        self.agreed_step = 0
        self.diverged_since: float | None = None

    def add(self, node: str, fact: Fact, now: float) -> None:
        """Add the digest of a member's heartbeat."""
        digest = decode_body(StateDigest, fact.body)
        if not _DIGEST_PATTERN.fullmatch(digest.digest):
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
        text = describe_divergence(found)
        end = JudgedFailure(DIGESTS.name, self.generation, encode_body(found), text)
        return Judgment(job_failure=end, root_causes=failures)

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


def find_diverged_nodes(
    groups: Collection[Sequence[str]], num_nodes: int, *, step: int, agreed_step: int = 0
) -> DivergenceVerdict:
    """Find the nodes outside a strict majority of all ``num_nodes`` members."""
    ordered = sorted(map(tuple, groups), key=len, reverse=True)
    has_majority = 2 * len(ordered[0]) > num_nodes
    diverged = tuple(name for group in ordered[1:] for name in group) if has_majority else ()
    return DivergenceVerdict(step, agreed_step, tuple(ordered), diverged)


DIGESTS = Topic("state-digest", ReplicaComparison, choose_digest)
