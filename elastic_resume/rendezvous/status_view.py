"""How the job looks from one agent, for people: plain data, taken from the core and changing nothing in it.

Pure. What nodes tell of themselves is not in it: that is `tidings.py`'s, and its receiver's.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.quorum import Incarnation, View


@dataclass(frozen=True, slots=True)
class RendezvousStatus:
    """What one agent sees. A leader sees all; another one its own part, and who leads."""

    incarnation: Incarnation
    is_leader: bool = False
    leader: Incarnation | None = None
    """None while nobody is known to lead."""
    view: View | None = None
    """The one that runs."""
    generation: int = 0
    """Of the newest world that is known to have begun."""
    spares: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Members of that newest world that are not here, as far as a leader without a world knows."""
    waiting_reason: str = ""
    """Why there is no world, in words."""
    end_reason: str = ""
    """Why this agent takes no part any more."""


def build_status(node: RendezvousNode) -> RendezvousStatus:
    """Take the view of an agent."""
    body, role = node.state, node.role
    generation = body.installed_generation
    if isinstance(role, Leader):
        members = role.view.members if role.view else ()
        here = {body.incarnation, *role.peers.by_incarnation}
        return RendezvousStatus(
            body.incarnation,
            is_leader=True,
            leader=body.incarnation,
            view=role.view,
            generation=generation,
            spares=tuple(sorted(one.node for one in here - set(members))) if role.view else (),
            missing=() if role.view else tuple(sorted(one.node for one in body.find_absent_members(here))),
            waiting_reason="" if role.view else role.explain_wait(),
            end_reason=node.end_reason,
        )
    leader = role.leader if isinstance(role, Follower) else None
    waiting = role.explain_wait() if role and not body.running_view and body.join else ""
    return RendezvousStatus(
        body.incarnation,
        leader=leader,
        view=body.running_view,
        generation=generation,
        waiting_reason=waiting,
        end_reason=node.end_reason,
    )
