"""What must hold in every simulated schedule, by name. They see what nodes do, not what they know."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.policy.failure_classification import Failure
from elastic_resume.rendezvous.core.events import StartWorkers
from elastic_resume.rendezvous.core.state import MAX_FAILURES
from elastic_resume.rendezvous.core.quorum import Incarnation

ONE_VIEW_PER_GENERATION = "one world per generation"
ONE_RUNNING_VIEW = "never two live worlds"
STABLE_RANKS = "ranks are a permutation, survivors in order"
MONOTONIC_GENERATION = "generation never goes back"
EVENTUAL_VIEW = "a lasting connected quorum forms a world"
JOB_ENDS_EVERYWHERE = "a job that is through ends on every node"
QUIESCENCE = "agents come to rest"
SAME_FAILURES = "all members hear the same of the last world's end, and little"
NO_FALSE_DEATH = "nobody who lives is counted gone"
UNUSED_GENERATION = "no generation that its leader has heard of is given again"
INVARIANTS = (
    ONE_VIEW_PER_GENERATION,
    ONE_RUNNING_VIEW,
    STABLE_RANKS,
    MONOTONIC_GENERATION,
    EVENTUAL_VIEW,
    JOB_ENDS_EVERYWHERE,
    QUIESCENCE,
    SAME_FAILURES,
    NO_FALSE_DEATH,
    UNUSED_GENERATION,
)


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken, when and how."""

    invariant: str
    at_s: float
    text: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.at_s:9.3f}  VIOLATED: {self.invariant}: {self.text}"


class InvariantChecker:
    """Follow every start and stop of workers anywhere.

    `waived` are the promises that the schedule may defeat (`schedule.WAIVED`).
    """

    def __init__(self, waived: frozenset[str] = frozenset()) -> None:
        self.waived = waived
        self.violations: list[Violation] = []
        self.views: dict[int, tuple[Incarnation, ...]] = {}
        self.starters: dict[int, set[Incarnation]] = {}
        """Which members of a generation have started workers in it: the others may not know that it began."""
        self.proposed: set[tuple[int, tuple[Incarnation, ...]]] = set()
        self.start_info: dict[int, tuple[int, tuple[Failure, ...]]] = {}
        self.last_generation: dict[str, int] = {}
        self.running: dict[str, StartWorkers] = {}
        self.suspended_runs: dict[str, StartWorkers] = {}
        """What runs on machines that are suspended."""
        self.finished_generations: set[int] = set()
        """Generations whose workers have succeeded on some node: nobody new is taken in any more."""

    def add_violation(self, invariant: str, at_s: float, text: str) -> None:
        """Note a violation, unless this promise is waived."""
        if invariant in self.waived:
            return
        self.violations.append(Violation(invariant, at_s, text))

    def on_start(self, node: str, incarnation: Incarnation, begin: StartWorkers, at_s: float) -> None:
        """Workers of that world start on that node."""
        generation, members = begin.generation, begin.members
        known = self.views.get(generation)
        if known is None:
            self._check_first_start(begin, at_s)
        elif known != members:
            self.add_violation(
                ONE_VIEW_PER_GENERATION,
                at_s,
                f"generation {generation} is {format_members(known)} and {format_members(members)}",
            )
        news = (begin.newest_step, begin.failures)
        if news != self.start_info.setdefault(generation, news) or len(begin.failures) > MAX_FAILURES:
            self.add_violation(
                SAME_FAILURES, at_s, f"{node} hears {news} and another {self.start_info[generation]}"
            )
        if len(set(members)) != len(members) or members[begin.rank] != incarnation:
            self.add_violation(
                STABLE_RANKS, at_s, f"{node} has rank {begin.rank} in {format_members(members)}"
            )
        if generation <= self.last_generation.get(node, 0):
            self.add_violation(
                MONOTONIC_GENERATION,
                at_s,
                f"{node} goes from generation {self.last_generation[node]} to {generation}",
            )
        self.last_generation[node] = max(generation, self.last_generation.get(node, 0))
        self.starters.setdefault(generation, set()).add(incarnation)
        self._add_running(node, begin, at_s)

    def _add_running(self, node: str, begin: StartWorkers, at_s: float) -> None:
        generation, members = begin.generation, begin.members
        for other, theirs in self.running.items():
            if (theirs.generation, theirs.members) != (generation, members):
                self.add_violation(
                    ONE_RUNNING_VIEW,
                    at_s,
                    f"{node} runs generation {generation} of {format_members(members)} while {other} "
                    f"runs {theirs.generation} of {format_members(theirs.members)}",
                )
        self.running[node] = begin

    def on_suspend(self, node: str) -> None:
        """The machine stands still, its workers too: they run no step until it goes on."""
        begin = self.running.pop(node, None)
        if begin:
            self.suspended_runs[node] = begin

    def on_wake(self, node: str, at_s: float, *, lease_expired: bool) -> None:
        """The machine goes on, and its workers with it unless their lease has run out."""
        begin = self.suspended_runs.pop(node, None)
        if begin and not lease_expired:
            self._add_running(node, begin, at_s)

    def _check_first_start(self, begin: StartWorkers, at_s: float) -> None:
        generation, members = begin.generation, begin.members
        newest = max(self.views, default=0)
        if generation < newest:
            self.add_violation(MONOTONIC_GENERATION, at_s, f"generation {generation} begins after {newest}")
        # Where generations may go back, the one with the greatest number is not the one before.
        if MONOTONIC_GENERATION not in self.waived:
            befores = [
                self.views.get(number, ()) for number in (newest, *self._find_known_generations(members))
            ]
            # One that was proposed later may have begun at its leader, whose Begin reached nobody in time.
            befores += [one for number, one in self.proposed if newest < number < generation]
            if not any(keeps_order(before, members) for before in befores):
                self.add_violation(
                    STABLE_RANKS,
                    at_s,
                    f"{' or '.join(map(format_members, befores))} became {format_members(members)}",
                )
        self.views[generation] = members

    def _find_known_generations(self, members: tuple[Incarnation, ...]) -> tuple[int, int]:
        """Return the newest world that one of these has begun, and that one of their nodes has; 0 for none.

        Ranks follow the newest of which somebody here knows that it began; that may be the newest of all,
        though none of these has begun it. A node that came back knows of it if its disk was quick enough.
        """
        nodes = {one.node for one in members}
        lives = [number for number, who in self.starters.items() if who.intersection(members)]
        disks = [number for number, who in self.starters.items() if nodes & {one.node for one in who}]
        return max(lives, default=0), max(disks, default=0)

    def on_disk_lost(self, node: str) -> None:
        """That node has lost its disk: it may be given a generation again."""
        self.last_generation.pop(node, None)

    def on_finish(self, node: str) -> None:
        """The workers of that node have succeeded."""
        begin = self.running.pop(node, None)
        if begin:
            self.finished_generations.add(begin.generation)

    def on_stop(self, node: str) -> None:
        """No worker runs on that node any more."""
        self.running.pop(node, None)
        self.suspended_runs.pop(node, None)


def keeps_order(before: tuple[Incarnation, ...], members: tuple[Incarnation, ...]) -> bool:
    """Whether those who were there before have the same order as then."""
    return [one for one in before if one in members] == [one for one in members if one in before]


def format_members(members: tuple[Incarnation, ...]) -> str:
    """Name members shortly, with their lives."""
    return "{" + " ".join(f"{one.node}{one.incarnation_id}" for one in members) + "}"
