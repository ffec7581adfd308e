"""Named invariants of every simulated schedule, checked by what nodes do, not by what they know."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.policy.failure_classification import Failure
from elastic_resume.rendezvous.core.events import StartWorkers
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.core.state import MAX_FAILURES

ONE_VIEW_PER_GENERATION = "one view per generation"
ONE_RUNNING_VIEW = "at most one running view"
STABLE_RANKS = "survivors keep the order of their ranks"
MONOTONIC_GENERATION = "generations never decrease"
EVENTUAL_VIEW = "a lasting connected quorum forms a view"
JOB_ENDS_EVERYWHERE = "a finished job ends on every node"
QUIESCENCE = "agents come to rest"
SAME_FAILURES = "all members get the same few causes of the last restart"
NO_FALSE_DEATH = "no live node counts as dead"
UNUSED_GENERATION = "no announced generation is reused"
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
    """One violated invariant, with time and details."""

    invariant: str
    at_s: float
    text: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.at_s:9.3f}  VIOLATED: {self.invariant}: {self.text}"


class InvariantChecker:
    """Checks every start and stop of workers. The schedule may violate the `waived` invariants."""

    def __init__(self, waived: frozenset[str] = frozenset()) -> None:
        self.waived = waived
        self.violations: list[Violation] = []
        self.views: dict[int, tuple[Incarnation, ...]] = {}
        self.starters: dict[int, set[Incarnation]] = {}
        """The members of a generation that have started workers; others may not know that it was installed.
        """
        self.proposed: set[tuple[int, tuple[Incarnation, ...]]] = set()
        self.start_info: dict[int, tuple[int, tuple[Failure, ...]]] = {}
        self.last_generation: dict[str, int] = {}
        self.running: dict[str, StartWorkers] = {}
        self.suspended_runs: dict[str, StartWorkers] = {}
        """Workers on suspended machines."""
        self.finished_generations: set[int] = set()
        """Generations whose workers have succeeded on some node, so that no newcomer is admitted."""

    def add_violation(self, invariant: str, at_s: float, text: str) -> None:
        """Record a violation, unless the invariant is waived."""
        if invariant in self.waived:
            return
        self.violations.append(Violation(invariant, at_s, text))

    def on_start(self, node: str, incarnation: Incarnation, start: StartWorkers, at_s: float) -> None:
        """Check a start of workers on a node."""
        generation, members = start.generation, start.members
        known = self.views.get(generation)
        if known is None:
            self._check_first_start(start, at_s)
        elif known != members:
            self.add_violation(
                ONE_VIEW_PER_GENERATION,
                at_s,
                f"generation {generation} is {format_members(known)} and {format_members(members)}",
            )
        causes = (start.newest_step, start.failures)
        if causes != self.start_info.setdefault(generation, causes) or len(start.failures) > MAX_FAILURES:
            self.add_violation(
                SAME_FAILURES, at_s, f"{node} gets {causes} and another node {self.start_info[generation]}"
            )
        if len(set(members)) != len(members) or members[start.rank] != incarnation:
            self.add_violation(
                STABLE_RANKS, at_s, f"{node} has rank {start.rank} in {format_members(members)}"
            )
        if generation <= self.last_generation.get(node, 0):
            self.add_violation(
                MONOTONIC_GENERATION,
                at_s,
                f"{node} goes from generation {self.last_generation[node]} to {generation}",
            )
        self.last_generation[node] = max(generation, self.last_generation.get(node, 0))
        self.starters.setdefault(generation, set()).add(incarnation)
        self._add_running(node, start, at_s)

    def _add_running(self, node: str, start: StartWorkers, at_s: float) -> None:
        generation, members = start.generation, start.members
        for other, theirs in self.running.items():
            if (theirs.generation, theirs.members) != (generation, members):
                self.add_violation(
                    ONE_RUNNING_VIEW,
                    at_s,
                    f"{node} runs generation {generation} of {format_members(members)} while {other} "
                    f"runs {theirs.generation} of {format_members(theirs.members)}",
                )
        self.running[node] = start

    def on_suspend(self, node: str) -> None:
        """Note that the machine and its workers stand still."""
        start = self.running.pop(node, None)
        if start:
            self.suspended_runs[node] = start

    def on_wake(self, node: str, at_s: float, *, lease_expired: bool) -> None:
        """Note that a suspended machine continues."""
        start = self.suspended_runs.pop(node, None)
        if start and not lease_expired:
            self._add_running(node, start, at_s)

    def _check_first_start(self, start: StartWorkers, at_s: float) -> None:
        generation, members = start.generation, start.members
        newest = max(self.views, default=0)
        if generation < newest:
            self.add_violation(MONOTONIC_GENERATION, at_s, f"generation {generation} begins after {newest}")
        # Where generations may go back, the one with the greatest number is not the one before.
        if MONOTONIC_GENERATION not in self.waived:
            befores = [
                self.views.get(number, ()) for number in (newest, *self._find_known_generations(members))
            ]
            # A later proposal may be installed at its leader only, if its InstallView arrived late.
            befores += [view for number, view in self.proposed if newest < number < generation]
            if not any(keeps_order(before, members) for before in befores):
                self.add_violation(
                    STABLE_RANKS,
                    at_s,
                    f"{' or '.join(map(format_members, befores))} became {format_members(members)}",
                )
        self.views[generation] = members

    def _find_known_generations(self, members: tuple[Incarnation, ...]) -> tuple[int, int]:
        """Return the newest generation that a member has started, and that any process of their nodes has.

        Ranks follow the newest view that a present node knows to be installed. A node that restarted knows it
        if its disk was fast enough.
        """
        nodes = {member.node for member in members}
        by_member = [
            generation for generation, starters in self.starters.items() if starters.intersection(members)
        ]
        by_node = [
            generation
            for generation, starters in self.starters.items()
            if nodes & {starter.node for starter in starters}
        ]
        return max(by_member, default=0), max(by_node, default=0)

    def on_disk_lost(self, node: str) -> None:
        """Note that a node has lost its disk, so it may start a generation again."""
        self.last_generation.pop(node, None)

    def on_finish(self, node: str) -> None:
        """Note that the workers of a node have succeeded."""
        start = self.running.pop(node, None)
        if start:
            self.finished_generations.add(start.generation)

    def on_stop(self, node: str) -> None:
        """Note that no worker runs on a node."""
        self.running.pop(node, None)
        self.suspended_runs.pop(node, None)


def keeps_order(before: tuple[Incarnation, ...], members: tuple[Incarnation, ...]) -> bool:
    """Return whether the members that were there before keep their order."""
    return [member for member in before if member in members] == [
        member for member in members if member in before
    ]


def format_members(members: tuple[Incarnation, ...]) -> str:
    """Format members with their incarnations."""
    return "{" + " ".join(f"{member.node}{member.incarnation_id}" for member in members) + "}"
