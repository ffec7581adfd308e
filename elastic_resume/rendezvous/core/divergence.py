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

from elastic_resume.policy.divergence import Digest, describe, judge, summary
from elastic_resume.policy.failure_classification import DIVERGENCE, Failure
from elastic_resume.rendezvous.core.events import ReplicasDiffer
from elastic_resume.rendezvous.core.messages import Diverged, Message, Print, Report
from elastic_resume.rendezvous.core.peers import Part, Roster
from elastic_resume.rendezvous.core.quorum import Incarnation, World
from elastic_resume.rendezvous.core.state import Body

KEPT_STEPS = 64
"""Of those at which not all members are known to be equal; with a heartbeat of 0.3 s, 20 s of them."""
DOUBT_TIMEOUTS = 20
"""So many node timeouts a leader waits for a step that shows who is wrong: a minute."""


class Comparer:
    """Compares the replicas of one leader's worlds."""

    def __init__(self, body: Body, roster: Roster, tell: Callable[[Part, Message], None]) -> None:
        """``tell`` sends a message to a follower."""
        self.body = body
        self.roster = roster
        self.tell = tell
        self.world: World | None = None
        self.agreed = 0
        self.steps: dict[int, dict[Digest, set[Incarnation]]] = {}
        self.unequal_since: float | None = None
        self.found: Diverged | None = None
        """What those who come back before the next world begins must hear, should they have missed it."""

    def began(self, world: World) -> None:
        """A world runs: nothing is known of it."""
        self.over()
        self.world, self.found = world, None

    def over(self) -> None:
        """No world runs."""
        self.world, self.unequal_since, self.agreed = None, None, 0
        self.steps.clear()

    def told(self, who: Incarnation, told: Print | None) -> None:
        """Take in the digest that a heartbeat brought."""
        world = self.world
        if told is None or world is None or self.found is not None or world.rank(who) is None:
            return
        if told.generation != world.generation or told.step <= self.agreed:
            return
        camps = self.steps.setdefault(told.step, {})
        camps.setdefault(told.digest, set()).add(who)
        if len(camps) > 1 and self.unequal_since is None:
            self.unequal_since = self.body.now
        elif len(camps[told.digest]) == len(world.members) and self.unequal_since is None:
            self.agreed = told.step
            self.steps = {step: camps for step, camps in self.steps.items() if step > told.step}
        if len(self.steps) > KEPT_STEPS:
            oldest, next_oldest, *_ = sorted(self.steps)  # of steps that differ the first one stays
            del self.steps[oldest if len(self.steps[oldest]) == 1 else next_oldest]

    def advance(self) -> str:
        """Judge when enough is known; return why the world is to restart, or nothing."""
        if self.world is None or self.unequal_since is None or self.found is not None:
            return ""
        members, timeout_s = len(self.world.members), self.body.settings.node_timeout_s
        waited_s = self.body.now - self.unequal_since
        unequal = [step for step, camps in sorted(self.steps.items()) if len(camps) > 1]
        for step in unequal:
            sizes = [len(camp) for camp in self.steps[step].values()]
            is_clear = 2 * max(sizes) > members and waited_s >= timeout_s
            if is_clear or sum(sizes) >= members:
                return self._conclude(self.world, step)
        return self._conclude(self.world, unequal[0]) if waited_s >= DOUBT_TIMEOUTS * timeout_s else ""

    def _conclude(self, world: World, step: int) -> str:
        camps = [
            [one.node for one in world.members if one in camp]  # in rank order
            for camp in self.steps[step].values()
        ]
        verdict = judge(camps, len(world.members), step=step, agreed_step=self.agreed)
        goes_on = bool(verdict.wrong) and self.body.settings.resume_from_majority
        self.found = Diverged(world.generation, verdict, goes_on)
        for part in self.roster:
            if part.lost_at is None:
                self.tell(part, self.found)
        self.body.effects.append(ReplicasDiffer(self.found))
        # It counts as a failure of the wrong nodes: one that goes on being wrong is left out.
        text = f"held another state at step {step} than the majority of nodes"
        for who in world.members:
            if who.node in verdict.wrong:
                failure = Failure(DIVERGENCE, who.node, None, text, step=step)
                self.body.heard(who, Report(world.generation, failure))
        if goes_on:
            return summary(verdict)
        self.body.failed = describe(verdict)
        return ""

    def remind(self, part: Part) -> None:
        """Say it again to one that is back: its link may have broken over it."""
        if self.found is not None and self.found.goes_on and part.who.node in self.found.verdict.wrong:
            self.tell(part, self.found)
