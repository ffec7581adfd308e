"""What must hold in every simulated schedule, by name. They see what nodes do, not what they know."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.policy.failure_classification import Failure
from elastic_resume.rendezvous.core.events import BeginWorld
from elastic_resume.rendezvous.core.failure_log import MAX_KEPT
from elastic_resume.rendezvous.core.quorum import Incarnation

ONE_WORLD = "one world per generation"
ONE_LIVE = "never two live worlds"
RANKS = "ranks are a permutation, survivors in order"
FORWARD = "generation never goes back"
BOUNDED = "a lasting connected quorum forms a world"
ENDS = "a job that is through ends on every node"
CALM = "agents come to rest"
SAME_NEWS = "all members hear the same of the last world's end, and little"
ALIVE = "nobody who lives is counted gone"
NEW_NUMBER = "no generation that its leader has heard of is given again"
PROMISES = (ONE_WORLD, ONE_LIVE, RANKS, FORWARD, BOUNDED, ENDS, CALM, SAME_NEWS, ALIVE, NEW_NUMBER)


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken, when and how."""

    checker: str
    at_s: float
    text: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.at_s:9.3f}  VIOLATED: {self.checker}: {self.text}"


class Checkers:
    """Follow every start and stop of workers anywhere.

    `waived` are the promises that the schedule may defeat (`schedule.WAIVED`).
    """

    def __init__(self, waived: frozenset[str] = frozenset()) -> None:
        self.waived = waived
        self.violations: list[Violation] = []
        self.worlds: dict[int, tuple[Incarnation, ...]] = {}
        self.started: dict[int, set[Incarnation]] = {}
        """Which members of a generation have started workers in it: the others may not know that it began."""
        self.proposed: set[tuple[int, tuple[Incarnation, ...]]] = set()
        self.news: dict[int, tuple[int, tuple[Failure, ...]]] = {}
        self.last: dict[str, int] = {}
        self.live: dict[str, BeginWorld] = {}
        self.asleep: dict[str, BeginWorld] = {}
        """What runs on machines that are suspended."""
        self.through: set[int] = set()
        """Generations whose workers have succeeded on some node: nobody new is taken in any more."""

    def violate(self, checker: str, at_s: float, text: str) -> None:
        """Note a violation, unless this promise is waived."""
        if checker in self.waived:
            return
        self.violations.append(Violation(checker, at_s, text))

    def began(self, node: str, me: Incarnation, begin: BeginWorld, at_s: float) -> None:
        """Workers of that world start on that node."""
        generation, members = begin.generation, begin.members
        known = self.worlds.get(generation)
        if known is None:
            self._first_start(begin, at_s)
        elif known != members:
            self.violate(ONE_WORLD, at_s, f"generation {generation} is {names(known)} and {names(members)}")
        news = (begin.step, begin.failures)
        if news != self.news.setdefault(generation, news) or len(begin.failures) > MAX_KEPT:
            self.violate(SAME_NEWS, at_s, f"{node} hears {news} and another {self.news[generation]}")
        if len(set(members)) != len(members) or members[begin.rank] != me:
            self.violate(RANKS, at_s, f"{node} has rank {begin.rank} in {names(members)}")
        if generation <= self.last.get(node, 0):
            self.violate(FORWARD, at_s, f"{node} goes from generation {self.last[node]} to {generation}")
        self.last[node] = max(generation, self.last.get(node, 0))
        self.started.setdefault(generation, set()).add(me)
        self._run(node, begin, at_s)

    def _run(self, node: str, begin: BeginWorld, at_s: float) -> None:
        generation, members = begin.generation, begin.members
        for other, theirs in self.live.items():
            if (theirs.generation, theirs.members) != (generation, members):
                self.violate(
                    ONE_LIVE,
                    at_s,
                    f"{node} runs generation {generation} of {names(members)} while {other} "
                    f"runs {theirs.generation} of {names(theirs.members)}",
                )
        self.live[node] = begin

    def suspended(self, node: str) -> None:
        """The machine stands still, its workers too: they run no step until it goes on."""
        begin = self.live.pop(node, None)
        if begin:
            self.asleep[node] = begin

    def woke(self, node: str, at_s: float, *, fenced: bool) -> None:
        """The machine goes on, and its workers with it unless their lease has run out."""
        begin = self.asleep.pop(node, None)
        if begin and not fenced:
            self._run(node, begin, at_s)

    def _first_start(self, begin: BeginWorld, at_s: float) -> None:
        generation, members = begin.generation, begin.members
        newest = max(self.worlds, default=0)
        if generation < newest:
            self.violate(FORWARD, at_s, f"generation {generation} begins after {newest}")
        # Where generations may go back, the one with the greatest number is not the one before.
        if FORWARD not in self.waived:
            befores = [self.worlds.get(number, ()) for number in (newest, *self._known_to(members))]
            # One that was proposed later may have begun at its leader, whose Begin reached nobody in time.
            befores += [one for number, one in self.proposed if newest < number < generation]
            if not any(in_order(before, members) for before in befores):
                self.violate(RANKS, at_s, f"{' or '.join(map(names, befores))} became {names(members)}")
        self.worlds[generation] = members

    def _known_to(self, members: tuple[Incarnation, ...]) -> tuple[int, int]:
        """Return the newest world that one of these has begun, and that one of their nodes has; 0 for none.

        Ranks follow the newest of which somebody here knows that it began; that may be the newest of all,
        though none of these has begun it. A node that came back knows of it if its disk was quick enough.
        """
        nodes = {one.node for one in members}
        lives = [number for number, who in self.started.items() if who.intersection(members)]
        disks = [number for number, who in self.started.items() if nodes & {one.node for one in who}]
        return max(lives, default=0), max(disks, default=0)

    def forgot(self, node: str) -> None:
        """That node has lost its disk: it may be given a generation again."""
        self.last.pop(node, None)

    def finished(self, node: str) -> None:
        """The workers of that node have succeeded."""
        begin = self.live.pop(node, None)
        if begin:
            self.through.add(begin.generation)

    def ended(self, node: str) -> None:
        """No worker runs on that node any more."""
        self.live.pop(node, None)
        self.asleep.pop(node, None)


def in_order(before: tuple[Incarnation, ...], members: tuple[Incarnation, ...]) -> bool:
    """Whether those who were there before have the same order as then."""
    return [one for one in before if one in members] == [one for one in members if one in before]


def names(members: tuple[Incarnation, ...]) -> str:
    """Name members shortly, with their lives."""
    return "{" + " ".join(f"{one.node}{one.life}" for one in members) + "}"
