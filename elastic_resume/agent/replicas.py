"""This node's part in the comparison of replicas: between what keeps its state and the rendezvous.

Promise: when this node is found wrong and the job goes on, its own later copies of that generation are
distrusted before it enters another world (`Member.join` waits). What was found is in the event log of every
node, with the names of the first tensors. Does not know how a state is kept or digested, nor who is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from elastic_resume.errors import ElasticResumeError
from elastic_resume.policy.divergence import Verdict, describe, labels
from elastic_resume.rendezvous.member import Member
from elastic_resume.rendezvous.messages import Diverged


class Tell(Protocol):
    """Writes an event: `Witness.note`."""

    def __call__(self, event: str, /, **fields: object) -> None:
        """Write one of that kind with these fields."""


class Replicas:
    """Tells the rendezvous of this node's state, and this node of the others'."""

    def __init__(
        self,
        member: Member,
        *,
        names: Callable[[], Sequence[str]],
        prints: Callable[[int, int], Sequence[str] | None],
        distrust: Callable[[int, int], None],
        say: Callable[[str], None],
        tell: Tell,
    ) -> None:
        """``names``, ``prints`` and ``distrust`` are called in one thread of their own.

        Args:
            member: of this node.
            names: gives those of all tensors, in the order of their digests.
            prints: gives the digests (`policy.divergence.Groups`) of this node's state of (generation,
                step), or None where they are not known any more.
            distrust: from now on the copies of that generation with a greater step than the one given do
                not count, in memory and on disk, those included that are still being made.
            say: gets one line for people.
            tell: gets the event.

        """
        self._member = member
        self._names = names
        self._distrust = distrust
        self._say = say
        self._tell = tell
        member.compare(explain=prints, names=names, differ=self._differ)

    def note(self, generation: int, step: int, digest: str) -> None:
        """Tell others how the state looked after that step; from any thread, without waiting.

        Raises:
            ValueError: ``digest`` is not 32 hexadecimal digits.

        """
        self._member.tell_print(generation, step, digest)

    def _differ(self, told: Diverged) -> None:
        verdict = Verdict(told.camps, told.wrong, told.differing, told.count)
        names = list(self._names())
        self._tell(
            "replicas-differ",
            generation=told.generation,
            step=told.step,
            agreed_step=told.agreed_step,
            nodes=[list(camp) for camp in told.camps],
            wrong=list(told.wrong),
            tensors=labels(verdict, names),
            differing=told.count,
            goes_on=told.goes_on,
        )
        if not told.goes_on:
            return  # the end of the job says it
        self._say(describe(verdict, names, step=told.step, agreed=told.agreed_step, goes_on=True))
        if self._member.node not in told.wrong:
            return
        try:
            self._distrust(told.generation, told.agreed_step)
        except ElasticResumeError as error:
            # The next start compares what it has resumed from, and would find it.
            self._say(f"copies that are wrong could not be set aside: {error}")
