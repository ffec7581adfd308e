"""Provide what the roles share: message dispatch, and the role of a node that has left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from elastic_resume.policy.reasons import DepartureReason, JoinObstacle
from elastic_resume.rendezvous.core import interface, messages
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.world import JobEnd

Handlers = Mapping[type[Any], Callable[[Any, Any, Any], object]]
"""By the class of a message: a function of the role, the sender and the message."""


class Role:
    """One part in the rendezvous; it ends when it has set `NodeState.next_role`."""

    _OWN_HANDLERS: ClassVar[Handlers] = {}
    """For events of this node's agent; the sender is None."""

    def __init__(self, state: NodeState) -> None:
        self.state = state

    def dispatch(self, handlers: Handlers, sender: object, message: object) -> bool:
        """Handle a message if the table has its class; return whether it has."""
        handler = handlers.get(type(message))
        if handler:
            handler(self, sender, message)
        return handler is not None

    def handle_message(self, link: Link, message: messages.Message) -> None:
        """Handle one message."""

    def handle_connected(self, link: Link) -> None:
        """Handle a call that was answered."""

    def handle_disconnected(self, link: Link) -> None:
        """Handle a broken link or a failed call."""

    def handle_own(self, event: interface.Event) -> None:
        """Handle an event of this node's agent."""
        self.dispatch(self._OWN_HANDLERS, None, event)

    def advance(self) -> None:
        """Do what is due."""

    def next_deadline(self) -> float:
        """Return when to advance next."""
        return float("inf")

    def explain_wait(self) -> JoinObstacle | None:
        """Return what this node waits for."""
        return None

    def hand_over(self, departure: DepartureReason) -> bool:
        """Prepare to leave; return whether others may decide a view without this node."""
        del departure
        return True

    def leave(self, departure: DepartureReason) -> None:
        """Send the nodes that follow, or the leader, a leave notice."""

    def close(self) -> None:
        """End the calls that the next role does not need."""


class Left(Role):
    """The role of a node that has left; it answers each searcher and each leader with the end of the job."""

    def __init__(self, state: NodeState, reason: interface.StopReason, end: JobEnd | None) -> None:
        super().__init__(state)
        self.reason = reason
        self.end = end

    def handle_message(self, link: Link, message: messages.Message) -> None:
        """Answer, and close the connection."""
        if self.end and isinstance(message, (messages.Hello, messages.LeaderAnnouncement)):
            self.state.send(link, self.end)
        self.state.disconnect(link)
