"""How the job looks from one agent, for people: plain data, taken from the core and changing nothing in it.

Pure. What nodes tell of themselves is not in it: that is `tidings.py`'s, and its receiver's.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.node import Agent
from elastic_resume.rendezvous.core.quorum import Incarnation, World


@dataclass(frozen=True, slots=True)
class View:
    """What one agent sees. A leader sees all; another one its own part, and who leads."""

    me: Incarnation
    leads: bool = False
    leader: Incarnation | None = None
    """None while nobody is known to lead."""
    world: World | None = None
    """The one that runs."""
    generation: int = 0
    """Of the newest world that is known to have begun."""
    spares: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Members of that newest world that are not here, as far as a leader without a world knows."""
    waiting: str = ""
    """Why there is no world, in words."""
    over: str = ""
    """Why this agent takes no part any more."""


def look(agent: Agent) -> View:
    """Take the view of an agent."""
    body, role = agent.body, agent.role
    generation = body.newest
    if isinstance(role, Leader):
        members = role.world.members if role.world else ()
        here = {body.me, *role.roster.parts}
        return View(
            body.me,
            leads=True,
            leader=body.me,
            world=role.world,
            generation=generation,
            spares=tuple(sorted(one.node for one in here - set(members))) if role.world else (),
            missing=() if role.world else tuple(sorted(one.node for one in body.rivals(here))),
            waiting="" if role.world else role.why_waiting(),
            over=agent.over,
        )
    leader = role.leader if isinstance(role, Follower) else None
    waiting = role.why_waiting() if role and not body.running and body.join else ""
    return View(
        body.me,
        leader=leader,
        world=body.running,
        generation=generation,
        waiting=waiting,
        over=agent.over,
    )
