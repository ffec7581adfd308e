"""Decide what the local leader does at a step boundary: snapshot, commit, compare or write directly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepBoundary:
    """What the local leader knows when a step has ended.

    ``announced_step`` is the step at which all local ranks expect the next snapshot; None if there is to be
    none. ``slot_count`` is the number of slots that fit into the node's memory.
    """

    step: int
    announced_step: int | None
    slot_count: int
    snapshots_off: bool = False
    is_commit_due: bool = False
    is_comparison_due: bool = False
    is_epoch_over: bool = False

    @property
    def takes_snapshots(self) -> bool:
        """Whether snapshots are taken for their own sake, and not for commits only."""
        return self.slot_count > 1 and not self.snapshots_off


@dataclass(frozen=True)
class BoundaryActions:
    """What to do now.

    ``leader_only``: the local leader copies alone, because the other ranks do not expect this snapshot.
    ``announces``: the local leader then announces the step of the next snapshot.
    """

    takes_snapshot: bool = False
    commits: bool = False
    compares: bool = False
    leader_only: bool = False
    announces: bool = False
    writes_directly: bool = False


def decide_actions(boundary: StepBoundary) -> BoundaryActions:
    """Decide what to do at a step boundary.

    With fewer than two slots, or with snapshots off, a snapshot serves a commit only. Without any slot the
    state goes to disk directly. The second snapshot of an epoch's last step is never compared.
    """
    commits, announced = boundary.is_commit_due, boundary.announced_step
    if boundary.slot_count == 0:
        return BoundaryActions(writes_directly=commits)
    if not boundary.takes_snapshots:
        return BoundaryActions(takes_snapshot=commits, commits=commits, leader_only=commits)
    is_expected = announced is not None and boundary.step >= announced
    compares = boundary.is_comparison_due and not boundary.is_epoch_over
    if not (is_expected or announced is None or commits or compares or boundary.is_epoch_over):
        return BoundaryActions()
    return BoundaryActions(
        takes_snapshot=True,
        commits=commits,
        compares=compares,
        leader_only=boundary.is_epoch_over or not is_expected,
        announces=True,
    )
