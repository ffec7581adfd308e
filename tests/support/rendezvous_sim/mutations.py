"""Mutation tests of the simulator: take one clause out of the core, and check that it is found.

Each entry of `MUTATIONS` patches a few functions of the core inside a ``with`` block. The core itself has no
switch for any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any
from unittest import mock

from elastic_resume.rendezvous.core import dead_leader, view_change
from elastic_resume.rendezvous.core.dead_leader import Contacts
from elastic_resume.rendezvous.core.messages import WorkersStatus
from elastic_resume.rendezvous.core.sequence import Acceptor, CastVotes, Electorate, Proposer
from elastic_resume.rendezvous.core.world import Incarnation, View

Patch = tuple[object, str, Any]
"""A class or module, the name of one of its attributes, and the attribute's value under the mutation."""


def _take_any_half(self: Electorate, voters: AbstractSet[str]) -> bool:
    return self.compare_with_half(len(voters)) >= 0


def _end_without_quorum() -> list[Patch]:
    advance, is_concluded = view_change.ViewChange.advance, view_change.ViewChange.is_concluded

    def propose_end(self: view_change.ViewChange) -> None:
        if self.end and not self.proposer.proposal:
            end = replace(self.end, generation=1 + self.state.acceptor.known.max_generation)
            self.proposer.propose(View(end.generation, ()), end)
        advance(self)

    def has_ended(self: view_change.ViewChange) -> bool:
        return bool(self.end and self.proposer.proposal) or is_concluded(self)

    return [
        (view_change.ViewChange, "advance", propose_end),
        (view_change.ViewChange, "is_concluded", has_ended),
    ]


def _mark_ended_whenever(self: Contacts, process: Incarnation) -> None:
    if process != self.acceptor.incarnation:
        self.ended.add(process)
        link = self.leader_links.get(process)
        if link:
            link.ended_in_contact = True


def _count_leader_first() -> Callable[..., bool]:
    breaks_tie = dead_leader.breaks_tie

    def breaks(*args: Any, is_free_of_heir: bool) -> bool:
        del is_free_of_heir
        return breaks_tie(*args, is_free_of_heir=True)

    return breaks


def _count_anyone() -> Callable[..., bool]:
    breaks_tie = dead_leader.breaks_tie

    def breaks(view: View, proposer: Incarnation, counted: CastVotes, **kwargs: bool) -> bool:
        has_taken = any(vote.has_taken for _, vote in counted.values())
        return has_taken or breaks_tie(view, proposer, counted, **kwargs)

    return breaks


def _count_restarted(view: View, _: Incarnation, counted: CastVotes, *, is_free_of_heir: bool) -> bool:
    del is_free_of_heir
    heirs = counted.get(view.heir.disk_id) if view.heir else None
    has_taken = heirs is not None and heirs[1].has_taken
    return has_taken or (view.leader is not None and view.leader.disk_id in counted)


def _count_handed(cast: CastVotes, lost_disks: AbstractSet[str] = frozenset()) -> CastVotes:
    del lost_disks
    held = {key: entry for entry in cast.values() for key in entry[1].held}
    return {**held, **cast}


@contextlib.contextmanager
def apply_mutation(name: str) -> Iterator[None]:
    """Patch the core inside the block; an empty name changes nothing."""
    with contextlib.ExitStack() as patches:
        for target, attribute, value in MUTATIONS[name]() if name else ():
            patches.enter_context(mock.patch.object(target, attribute, value))
        yield


MUTATIONS: dict[str, Callable[[], list[Patch]]] = {
    # Exactly half of a view's members are a quorum, whichever half.
    "any-half": lambda: [
        (Electorate, "has_quorum", _take_any_half),
        (dead_leader, "breaks_tie", lambda *_, **__: True),
    ],
    # A node votes on the next view while its workers run.
    "vote-while-running": lambda: [(WorkersStatus, "can_vote", True)],
    # A new leader proposes what it likes, whatever others have accepted.
    "nothing-bound": lambda: [(Proposer, "find_proposal_to_repeat", lambda *_: None)],
    # Promises and accepted proposals are sent before they are on disk.
    "votes-before-disk": lambda: [(Acceptor, "is_durable", True)],
    # A node that was in no view votes.
    "newcomers-vote": lambda: [(Electorate, "find_key", lambda _, node: node.disk_id)],
    # The leader ends the job without a decision.
    "end-undecided": _end_without_quorum,
    # Any member takes the vote of a leader that it knows to have ended.
    "anyone-takes": lambda: [
        (dead_leader, "may_take", lambda _, taker, dead: taker != dead),
        (dead_leader, "breaks_tie", _count_anyone()),
    ],
    # A vote is taken however long ago the last contact was.
    "late-taking": lambda: [(Contacts, "mark_ended", _mark_ended_whenever)],
    # The leader of a view does not wait for its heir's vote.
    "leader-votes-first": lambda: [(dead_leader, "breaks_tie", _count_leader_first())],
    # A restarted leader votes, although its vote may have been taken.
    "restarted-vote": lambda: [(dead_leader, "breaks_tie", _count_restarted)],
    # A node that has handed its vote over votes nevertheless.
    "handed-vote": lambda: [(dead_leader, "find_counted", _count_handed)],
}
