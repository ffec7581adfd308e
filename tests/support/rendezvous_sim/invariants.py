"""Named invariants of every simulated schedule, checked by what nodes do, not by what they know."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from elastic_resume.policy.failure_classification import MAX_FAILURES, Failure
from elastic_resume.rendezvous.core.interface import StartWorkers
from elastic_resume.rendezvous.core.world import Incarnation, View

ONE_VIEW_PER_GENERATION = "one view per generation"
ONE_WHOLE_VIEW = "at most one whole view"
ONE_DECISION = "a slot is decided once"
NO_STEP_AFTER_SUCCESSOR = "no view is whole once a later one is decided"
STABLE_RANKS = "survivors keep the order of their ranks"
MONOTONIC_GENERATION = "generations never decrease"
EVENTUAL_VIEW = "a lasting connected quorum forms a view"
JOB_ENDS_EVERYWHERE = "a finished job ends on every node"
QUIESCENCE = "agents come to rest"
SAME_FAILURES = "all members get the same few causes of the last restart"
NO_FALSE_DEATH = "no live node counts as dead"
FEW_VIEWS = "few views begin after the last fault"
INVARIANTS = (
    ONE_VIEW_PER_GENERATION,
    ONE_WHOLE_VIEW,
    NO_STEP_AFTER_SUCCESSOR,
    ONE_DECISION,
    STABLE_RANKS,
    MONOTONIC_GENERATION,
    EVENTUAL_VIEW,
    JOB_ENDS_EVERYWHERE,
    QUIESCENCE,
    SAME_FAILURES,
    NO_FALSE_DEATH,
    FEW_VIEWS,
)

WholeView = tuple[int, tuple[Incarnation, ...]]
"""A generation and its members. By a fault of the core, two views may share a generation."""


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
        """The members of each generation; of two views that share one, those of the first."""
        self.start_info: dict[int, tuple[int, tuple[Failure, ...], tuple[str, ...]]] = {}
        self.last_generation: dict[str, int] = {}
        self.running: dict[str, StartWorkers] = {}
        """What runs on each machine, by its address."""
        self.running_members: defaultdict[WholeView, set[Incarnation]] = defaultdict(set)
        self.decided: dict[int, View] = {}
        """The value of each slot, by the generation before."""
        self.learned: dict[int, tuple[Incarnation, ...]] = {}
        """The members of each generation that any node knows to be decided."""
        self.newest_decided = 0
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
        causes = (start.newest_step, start.failures, start.preparing_nodes)
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
        self._add_running(node, start, at_s)

    def _add_running(self, node: str, start: StartWorkers, at_s: float) -> None:
        self._remove_running(node)
        self.running[node] = start
        self.running_members[start.generation, start.members].add(start.members[start.rank])
        self._check_whole_views(at_s)

    def _remove_running(self, node: str) -> StartWorkers | None:
        start = self.running.pop(node, None)
        if start:
            view = start.generation, start.members
            self.running_members[view].discard(start.members[start.rank])
            if not self.running_members[view]:
                del self.running_members[view]
        return start

    def find_whole_views(self) -> list[WholeView]:
        """Return the views of which all members run, so that they can take a step."""
        return [view for view, nodes in self.running_members.items() if len(nodes) == len(view[1])]

    def _check_whole_views(self, at_s: float) -> None:
        whole = self.find_whole_views()
        if len(whole) > 1:
            text = " and ".join(f"{generation}{format_members(members)}" for generation, members in whole)
            self.add_violation(ONE_WHOLE_VIEW, at_s, f"{text} are whole at once")
        oldest = min((generation for generation, _ in whole), default=self.newest_decided)
        if oldest < self.newest_decided:
            text = f"generation {oldest} is whole although {self.newest_decided} is decided"
            self.add_violation(NO_STEP_AFTER_SUCCESSOR, at_s, text)

    def on_suspend(self, node: str) -> None:
        """Note that the machine and its workers stand still."""
        start = self._remove_running(node)
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
            before = self.learned.get(max((it for it in self.learned if it < generation), default=0), ())
            if not keeps_order(before, members):
                text = f"{format_members(before)} became {format_members(members)}"
                self.add_violation(STABLE_RANKS, at_s, text)
        self.learned.setdefault(generation, members)
        self.views[generation] = members

    def on_decided(self, slot: int | None, view: View, at_s: float) -> None:
        """Note that a leader has decided a slot, or that a node has learned of a decision."""
        others = [View(view.generation, self.learned.setdefault(view.generation, view.members))]
        if slot is not None:
            others.append(self.decided.setdefault(slot, view))
        for other in others:
            if (other.generation, other.members) != (view.generation, view.members):
                text = f"{other.generation}{format_members(other.members)} and "
                text += f"{view.generation}{format_members(view.members)}, learned after {slot}"
                self.add_violation(ONE_DECISION, at_s, text)
        self.newest_decided = max(self.newest_decided, view.generation)
        self._check_whole_views(at_s)

    def on_disk_lost(self, node: str) -> None:
        """Note that a node has lost its disk, so it may start a generation again."""
        self.last_generation.pop(node, None)

    def on_finish(self, node: str) -> None:
        """Note that the workers of a node have succeeded."""
        start = self._remove_running(node)
        if start:
            self.finished_generations.add(start.generation)

    def on_stop(self, node: str) -> None:
        """Note that no worker runs on a node."""
        self._remove_running(node)
        self.suspended_runs.pop(node, None)


def keeps_order(before: tuple[Incarnation, ...], members: tuple[Incarnation, ...]) -> bool:
    """Return whether the members that were there before keep their order."""
    return [member for member in before if member in members] == [
        member for member in members if member in before
    ]


def format_members(members: tuple[Incarnation, ...]) -> str:
    """Format members with their incarnations."""
    return "{" + " ".join(f"{member.node}{member.boot}" for member in members) + "}"
