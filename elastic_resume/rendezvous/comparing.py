"""A leader's comparison of what the members of its world tell of their state, and what follows from it.

Each heartbeat brings at most one print (generation, step, digest). Prints of one step that differ make the
leader ask all members once for the digests of their tensors; it judges when all have answered, or after a
node timeout, by what it has then, and tells everybody. By the setting of this leader the job then ends for
all, or the world restarts and those outside a strict majority take the majority's state.

Not all nodes digest every step that some do. Where that leaves nobody to be named, the leader is in doubt: it
waits for a step that enough of them tell of, since replicas that came apart stay so, and asks once more.

It promises O(1) messages for each node and generation besides heartbeats, and to remember `KEPT_STEPS` steps
at most. A world that ends while its members are being asked is not judged: what nodes resume from is
compared before their first step. Decides nothing about who is wrong: `policy.divergence` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_resume.policy.divergence import Digest, Groups, Verdict, describe, judge, summary
from elastic_resume.policy.failures import DIVERGENCE, Failure
from elastic_resume.rendezvous.body import Body
from elastic_resume.rendezvous.messages import Diverged, Explain, Message, Print, Prints, Report
from elastic_resume.rendezvous.quorum import Incarnation, World
from elastic_resume.rendezvous.roster import Part, Roster
from elastic_resume.rendezvous.steps import AskPrints, ReplicasDiffer

KEPT_STEPS = 64
"""Of those at which not all members are known to be equal; with a heartbeat of 0.3 s, 20 s of them."""
DOUBT_TIMEOUTS = 20
"""So many node timeouts a leader waits for a step that shows who is wrong: a minute."""


@dataclass(slots=True)
class _Question:
    """Members are asked to explain their state after that step."""

    step: int
    until: float
    awaited: set[Incarnation]
    groups: dict[Incarnation, Groups] = field(default_factory=dict)
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A verdict that names nobody, and until when it need not be the last."""

    question: _Question
    verdict: Verdict
    until: float


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
        self.question: _Question | None = None
        self.doubt: _Doubt | None = None
        self.found: Diverged | None = None
        """What those who come back before the next world begins must hear, should they have missed it."""

    def began(self, world: World) -> None:
        """A world runs: nothing is known of it."""
        self.over()
        self.world, self.found = world, None

    def over(self) -> None:
        """No world runs."""
        self.world, self.question, self.doubt, self.agreed = None, None, None, 0
        self.steps.clear()

    def told(self, who: Incarnation, told: Print | None) -> None:
        """Take in a print; ask all when it differs from another's."""
        world = self.world
        if told is None or world is None or told.generation != world.generation:
            return
        if told.step <= self.agreed or world.rank(who) is None:
            return
        camps = self.steps.setdefault(told.step, {})
        camps.setdefault(told.digest, set()).add(who)
        if len(self.steps) > KEPT_STEPS:
            del self.steps[min(self.steps)]
        if self.question is not None or self.found is not None:
            return
        if len(camps) > 1:
            if self.doubt is None or _is_clear(world, camps):
                self._ask(world, told.step)
        elif self.doubt is None and len(camps[told.digest]) == len(world.members):
            self.agreed = told.step
            self.steps = {step: camps for step, camps in self.steps.items() if step > told.step}

    def _ask(self, world: World, step: int) -> None:
        body = self.body
        parts = [part for part in self.roster if part.lost_at is None and world.rank(part.who) is not None]
        awaited = {part.who for part in parts}
        for part in parts:
            self.tell(part, Explain(world.generation, step))
        if world.rank(body.me) is not None:
            awaited.add(body.me)
            body.effects.append(AskPrints(world.generation, step))
        self.question = _Question(step, body.now + body.settings.node_timeout_s, awaited)

    def explained(self, who: Incarnation, told: Prints, names: tuple[str, ...] = ()) -> None:
        """Take in an answer, each node's first; with our own, the names of all tensors."""
        world, question = self.world, self.question
        if world is None or question is None or who not in question.awaited:
            return
        if (told.generation, told.step) != (world.generation, question.step):
            return
        question.awaited.discard(who)
        question.names = names or question.names
        if told.digest:
            self.steps.setdefault(told.step, {}).setdefault(told.digest, set()).add(who)
        if told.groups:
            # Most are equal, and then one is kept: a thousand times 4096 digests would be 250 MB.
            kept = (groups for groups in question.groups.values() if groups == told.groups)
            question.groups[who] = next(kept, told.groups)

    def advance(self) -> str:
        """Judge when all have answered or time is up; return why the world is to restart, or nothing."""
        world, question, doubt, now = self.world, self.question, self.doubt, self.body.now
        if world is None:
            return ""
        if question is None:
            if doubt is None or now < doubt.until:
                return ""
            return self._conclude(world, doubt.question, doubt.verdict)
        if question.awaited and now < question.until:
            return ""
        self.question = None
        verdict = self._judge(world, question)
        if verdict is None:
            return ""
        if verdict.wrong or sum(map(len, verdict.camps)) == len(world.members):
            return self._conclude(world, question, verdict)
        until = now + DOUBT_TIMEOUTS * self.body.settings.node_timeout_s
        self.doubt = doubt or _Doubt(question, verdict, until)
        clear = next((step for step, camps in sorted(self.steps.items()) if _is_clear(world, camps)), None)
        if clear is not None:
            self._ask(world, clear)
        return ""

    def _conclude(self, world: World, question: _Question, verdict: Verdict) -> str:
        self.doubt = None
        goes_on = bool(verdict.wrong) and self.body.settings.resume_from_majority
        self._tell_all(world, question, verdict, goes_on=goes_on)
        self._note(world, question.step, verdict)
        if goes_on:
            return summary(verdict, question.step)
        self.body.failed = describe(verdict, question.names, step=question.step, agreed=self.agreed)
        return ""

    def _judge(self, world: World, question: _Question) -> Verdict | None:
        """Judge by digests; tensors show in what camps differ, and where they do not, nothing is known."""
        digests = {who: digest for digest, camp in self.steps.get(question.step, {}).items() for who in camp}
        by_digest = {digests[who]: groups for who, groups in question.groups.items() if who in digests}
        told: dict[str, tuple[str, ...]] = {}
        for who in world.members:  # in rank order
            if who in digests:
                told[who.node] = by_digest.get(digests[who], Groups((digests[who],)))
            elif question.groups.get(who) in by_digest.values():
                told[who.node] = question.groups[who]
        whole = {who.node: (str(digests[who]),) for who in world.members if who in digests}
        return judge(told, len(world.members)) or judge(whole, len(world.members))

    def _tell_all(self, world: World, question: _Question, verdict: Verdict, *, goes_on: bool) -> None:
        told = Diverged(
            world.generation,
            question.step,
            self.agreed,
            verdict.camps,
            verdict.wrong,
            verdict.differing,
            verdict.count,
            goes_on,
        )
        for part in self.roster:
            if part.lost_at is None:
                self.tell(part, told)
        self.body.effects.append(ReplicasDiffer(told))
        self.found = told if goes_on else None

    def _note(self, world: World, step: int, verdict: Verdict) -> None:
        """Have it counted as a failure of the wrong nodes: one that goes on being wrong is left out."""
        text = f"held another state at step {step} than the majority of nodes"
        for who in world.members:
            if who.node in verdict.wrong:
                self.body.heard(
                    who, Report(world.generation, Failure(DIVERGENCE, who.node, None, text, step=step))
                )

    def remind(self, part: Part) -> None:
        """Say it again to one that is back: its link may have broken over it."""
        if self.found is not None and part.who.node in self.found.wrong:
            self.tell(part, self.found)


def _is_clear(world: World, camps: dict[Digest, set[Incarnation]]) -> bool:
    """Whether prints of one step that differ tell as much as can be known: a majority, or all."""
    sizes = [len(camp) for camp in camps.values()]
    return len(sizes) > 1 and (2 * max(sizes) > len(world.members) or sum(sizes) == len(world.members))
