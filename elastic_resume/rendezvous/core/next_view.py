"""Decide whether a leader proposes the next view, with which nodes, or why it waits: one pure function.

A view change waits for followers until they have stopped their workers. It waits one node timeout for absent
members, since they may be searching for this leader. At the first start it waits until no newcomer has joined
for the last-call timeout. Nodes that spoiled views, that others cannot reach, or whose workers take long to
start are left out if the others are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from elastic_resume.policy.reachability import choose_left_out
from elastic_resume.policy.reasons import (
    LastCall,
    MembersAbsent,
    NodesUnreachable,
    TooFewNodes,
    Wait,
    WaitReason,
    WorkersRunning,
    name_nodes,
)
from elastic_resume.rendezvous.core.backoff import Backoff
from elastic_resume.rendezvous.core.interface import RendezvousSettings
from elastic_resume.rendezvous.core.messages import JoinSpec, Workers, WorkersStatus
from elastic_resume.rendezvous.core.peers import NEVER
from elastic_resume.rendezvous.core.world import Incarnation, View


@dataclass(frozen=True, slots=True)
class Plan:
    """The nodes to propose, in any order; or why to wait, and until when."""

    joins: Mapping[Incarnation, JoinSpec] = field(default_factory=dict)
    reason: WaitReason | None = None
    until: float = float("inf")
    is_blocked: bool = False
    """Another leader may be able to form a view, and this one is not."""
    left_out: Mapping[Incarnation, NodesUnreachable] = field(default_factory=dict)
    """The joined nodes that others cannot reach, and why."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a leader knows when no workers run any more, and it considers the next view."""

    settings: RendezvousSettings
    now: float
    view: View
    """The last one."""
    nodes: Mapping[Incarnation, WorkersStatus]
    """The followers and this node."""
    missing_votes: WaitReason | None
    """None if the votes suffice."""
    absent: AbstractSet[Incarnation]
    """Members of the last view that are not here, and may come."""
    unreachable: AbstractSet[Incarnation]
    """Absent nodes for which nobody waits."""
    has_replaced: bool
    """A member is back with an empty disk."""
    apart: frozenset[frozenset[str]]
    """Pairs of nodes of which no view may have both, as they cannot reach each other."""
    backoff: Backoff
    began_at: float
    """When the last view ended, or this node began to lead."""
    last_arrival_at: float
    """When the last newcomer joined."""

    def plan(self) -> Plan:
        """Decide whether to propose a view; the workers of the last one have ended."""
        joins = {node: join for node, status in self.nodes.items() if (join := status.join)}
        left_out = self._find_left_out(joins)
        for node in left_out:
            del joins[node]
        joins = self._leave_out_spoilers(joins)
        settings, missing = self.settings, self.missing_votes
        if not list_finished(self.nodes) and len(joins) < settings.min_nodes:
            reason = TooFewNodes(len(joins), settings.min_nodes, tuple(left_out.values()))
            # Another leader may reach nodes that take the place of those that are left out.
            is_blocked = bool(missing or (left_out and len(self.nodes) < settings.max_nodes))
            return Plan(reason=reason, until=self._retry_at, is_blocked=is_blocked, left_out=left_out)
        if missing:
            return Plan(reason=missing, until=self._retry_at, is_blocked=True, left_out=left_out)
        if not joins:
            return Plan(reason=TooFewNodes(0, settings.min_nodes), left_out=left_out)
        until = self._compute_deadline(is_full=len(joins) >= settings.max_nodes)
        if self.now < until:
            return Plan(reason=self._name_absent(joins), until=until, left_out=left_out)
        return Plan(self._leave_out_preparing(joins), left_out=left_out)

    @property
    def _retry_at(self) -> float:
        """When to look again: this node's own vote may count only after a while, without any message."""
        return self.now + self.settings.heartbeat_interval_s if self.missing_votes else float("inf")

    def _find_left_out(self, joins: Mapping[Incarnation, JoinSpec]) -> dict[Incarnation, NodesUnreachable]:
        """Choose which of the joined nodes to leave out, because others cannot reach them."""
        ranked = rank_members(self.view, joins, len(joins)) if self.apart else ()
        nodes = {node.node: node for node in ranked}
        members = [name for name, node in nodes.items() if self.view.rank(node) is not None]
        left_out = choose_left_out(members, list(nodes)[len(members) :], self.apart)
        if len(nodes) - len(left_out) < self.settings.min_nodes:
            left_out = choose_left_out(list(nodes), [], self.apart)  # a newcomer may replace a member then
        return {nodes[name]: NodesUnreachable(name, name_nodes(others)) for name, others in left_out.items()}

    def _leave_out_spoilers(self, joins: dict[Incarnation, JoinSpec]) -> dict[Incarnation, JoinSpec]:
        """Leave out nodes that have to wait, if the others are enough."""
        waiting = {node for node in joins if self.now < self.backoff.wait_until(node)}
        if not waiting:
            return joins
        ready = {node: join for node, join in joins.items() if node not in waiting}
        # If most have to wait, it was this node's own link that broke.
        is_enough = len(ready) >= self.settings.min_nodes and 2 * len(ready) > len(joins)
        return ready if is_enough else joins

    def _leave_out_preparing(self, joins: dict[Incarnation, JoinSpec]) -> dict[Incarnation, JoinSpec]:
        """Leave out nodes that prepare, if the others are enough, with a member of the last view."""
        ready = {node: join for node, join in joins.items() if not join.is_preparing}
        has_survivor = any(self.view.rank(node) is not None for node in ready)
        return ready if has_survivor and len(ready) >= self.settings.min_nodes else joins

    def _name_absent(self, joins: Mapping[Incarnation, JoinSpec]) -> WaitReason:
        if self.absent:
            return MembersAbsent(name_nodes(self.absent), len(self.absent))
        return LastCall(len(joins), self.settings.max_nodes, self.settings.last_call_timeout_s)

    def _compute_deadline(self, *, is_full: bool) -> float:
        """Return until when absent nodes may come."""
        settings, until = self.settings, NEVER
        if not self.absent <= self.unreachable:
            until = self.began_at + settings.node_timeout_s
        if settings.max_nodes > 1 and (not self.view.members or self.has_replaced):
            # If disks were lost, a view may run that no present node knows. Its leader connects soon.
            since = self.last_arrival_at if self.view.members else self.began_at
            until = max(until, since + 2 * settings.announce_interval_s)
        has_survivors = any(member in self.nodes for member in self.view.members)
        if not has_survivors and not is_full:
            until = max(until, self.last_arrival_at + settings.last_call_timeout_s)
        return until


def wait_for_workers(
    own: Incarnation, nodes: Mapping[Incarnation, WorkersStatus], stop_for_s: float, *, has_broken_link: bool
) -> Plan | None:
    """Return why to wait before anything else, at most `stop_for_s` longer for workers to stop; or None."""
    is_late = stop_for_s <= 0
    if not nodes[own].can_vote:
        return Plan(reason=WorkersRunning(own.node), is_blocked=is_late)
    if has_broken_link:
        return Plan(reason=Wait.LINK_BROKEN)
    running = next((node for node, status in nodes.items() if not status.can_vote), None)
    return Plan(reason=WorkersRunning(running.node)) if running and not is_late else None


def list_finished(nodes: Mapping[Incarnation, WorkersStatus]) -> list[str]:
    """Return the nodes here whose workers have succeeded. Fewer than the minimum may then end, too."""
    return [node.node for node, status in nodes.items() if status.workers is Workers.FINISHED]


def rank_members(
    last: View, joins: Mapping[Incarnation, JoinSpec], max_members: int
) -> tuple[Incarnation, ...]:
    """Order the joined nodes by rank: members of the last view as before, then newcomers.

    Newcomers follow the scheduler's order. Nodes beyond `max_members` are spares.
    """
    survivors = dict.fromkeys(member for member in last.members if member in joins)
    newcomers = [incarnation for incarnation in joins if incarnation not in survivors]
    newcomers.sort(key=lambda newcomer: (joins[newcomer].node_order, newcomer.node, newcomer.disk_id))
    return tuple([*survivors, *newcomers][:max_members])
