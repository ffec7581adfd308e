"""What slows a job: figures that nodes tell of their ranks and links in, lines for people and events out.

Only who leads compares all nodes, once a second. One that leads no more forgets what it has told, and the
next begins anew. `policy.stragglers` and `policy.links` say what is slow.

Promise: `Slowness.ranks` and `Slowness.links` may be read from any thread, at any time. Does not know whence
the figures come, nor who reads what it tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from elastic_resume.agent.document import Known
from elastic_resume.plural import amount
from elastic_resume.policy import links, stragglers
from elastic_resume.policy.links import Links, SlowLink
from elastic_resume.policy.stragglers import Pace, Straggler, Stragglers

FRESH_NODE_S = 5.0
"""A node that has told nothing for so long is compared with nobody."""


class Slowness:
    """The slow ranks and links of a job, as its leader sees them."""

    def __init__(self, *, say: Callable[[str], None], tell: Callable[..., None]) -> None:
        """``say`` gets a line for people, ``tell`` an event's kind and fields."""
        self._say = say
        self._tell = tell
        self.forget()

    def forget(self) -> None:
        """Begin anew: this node leads no more, or not yet."""
        self._stragglers, self._links = Stragglers(), Links()
        self.ranks: Sequence[Straggler] = ()  # slow now; replaced as a whole, as those who read need no lock
        self.links: Sequence[SlowLink] = ()

    def look(self, known: Mapping[str, Known], now: float) -> None:
        """Compare all nodes, by what each has told last; tell of what has become slow, or is so no more.

        ``now``: of the clock by which they were heard.
        """
        told = {node: one.pulse for node, one in known.items() if now < one.heard_at + FRESH_NODE_S}
        generation = max((one.generation for one in told.values()), default=0)
        paces = {
            node: Pace(one.generation, one.step, one.workers, one.slowest, one.own_s, one.rest_s)
            for node, one in told.items()
            if one.slowest is not None and one.own_s is not None
        }
        rounds_s = {node: one.round_s for node, one in told.items() if one.round_s is not None}
        ranks = self._stragglers.take(paces, now)
        slow = self._links.take(generation, rounds_s)
        self.ranks, self.links = self._stragglers.slow, self._links.slow
        for rank in ranks:
            self._tell_of_rank(rank)
        for link in slow:
            self._tell_of_link(link, generation)

    def _tell_of_rank(self, one: Straggler) -> None:
        self._tell(
            "slow-rank",
            generation=one.generation,
            step=one.step,
            slow_node=one.node,
            slow_rank=one.rank,
            own_s=round(one.own_s, 4),
            others_s=round(one.others_s, 4),
            steps=one.steps,
            cost_s=round(one.cost_s, 3),
            is_over=one.is_over,
        )
        said = stragglers.describe(one.rank, one.node, one.own_s, one.others_s)
        cost = f"{amount(one.steps, 'step')} took {one.cost_s:.2g} s longer for it"
        self._say(f"{said}; that is over, {cost}." if one.is_over else f"{said}.")

    def _tell_of_link(self, one: SlowLink, generation: int) -> None:
        self._tell(
            "slow-link",
            generation=generation,
            slow_node=one.node,
            round_s=round(one.round_s, 4),
            others_s=round(one.others_s, 4),
            is_over=one.is_over,
        )
        said = links.describe(one.node, one.round_s, one.others_s)
        self._say(f"{said}; that is over." if one.is_over else f"{said}.")
