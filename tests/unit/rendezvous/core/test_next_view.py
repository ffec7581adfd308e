"""When a leader proposes the next view, with which nodes, or why it waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.policy.reasons import LastCall, MembersAbsent, TooFewNodes, VotesMissing, WaitReason
from elastic_resume.rendezvous.core.backoff import Backoff
from elastic_resume.rendezvous.core.interface import RendezvousSettings
from elastic_resume.rendezvous.core.messages import JoinSpec, Workers, WorkersStatus
from elastic_resume.rendezvous.core.next_view import Situation
from elastic_resume.rendezvous.core.world import Incarnation, View

A, B, C, D = (Incarnation(name, f"disk of {name}") for name in "abcd")
VIEW = View(1, (A, B, C), A)
NOW = 100.0
VOTES_MISSING = VotesMissing(1, 1, 2, ("b",), 1)
APART = frozenset({frozenset({"b", "c"})})


def joined(*, is_preparing: bool = False) -> WorkersStatus:
    """Return the status of a node that has joined."""
    return WorkersStatus(Workers.JOINED, 1, JoinSpec("x:1", 1, is_preparing=is_preparing))


def make_situation(*nodes: Incarnation, **fields: object) -> Situation:
    """Return one in which these nodes have joined, long after the last view of a, b and c."""
    settings = RendezvousSettings(("a",), min_nodes=2, max_nodes=4)
    absent = set(VIEW.members) - set(nodes)
    situation = Situation(
        settings,
        NOW,
        VIEW,
        dict.fromkeys(nodes, joined()),
        missing_votes=None,
        absent=absent,
        unreachable=frozenset(),
        has_replaced=False,
        apart=frozenset(),
        backoff=Backoff(settings.node_timeout_s),
        began_at=NOW - 60,
        last_arrival_at=NOW - 60,
    )
    return replace(situation, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("situation", "names"),
    [
        (make_situation(A, B, C), "abc"),
        (make_situation(A, C), "ac"),  # nobody waits for b any more
        (make_situation(A, B, C, D), "abcd"),
        (make_situation(A, B, C, apart=APART), "ab"),
        (make_situation(A, B, unreachable={C}, began_at=NOW), "ab"),
    ],
)
def test_view_is_proposed_with_the_nodes_that_can_train_together(situation: Situation, names: str) -> None:
    """The votes suffice, and enough nodes are here."""
    plan = situation.plan()
    assert plan.reason is None
    assert "".join(sorted(node.node for node in plan.joins)) == names


@pytest.mark.parametrize(
    ("situation", "reason", "is_blocked"),
    [
        (make_situation(A, B, began_at=NOW), MembersAbsent, False),
        (make_situation(A, B, view=View(0, ()), absent=set(), last_arrival_at=NOW), LastCall, False),
        (make_situation(A), TooFewNodes, False),
        (make_situation(A, B, missing_votes=VOTES_MISSING), VotesMissing, True),
        (make_situation(A, missing_votes=VOTES_MISSING), TooFewNodes, True),
        # Another leader may reach a node that takes the place of the one that is left out.
        (make_situation(B, C, apart=APART), TooFewNodes, True),
    ],
)
def test_leader_waits_and_another_may_lead_if_it_is_blocked(
    situation: Situation, reason: type[WaitReason], *, is_blocked: bool
) -> None:
    """Each wait has a reason; only a wait that another leader might not have blocks this one."""
    plan = situation.plan()
    assert isinstance(plan.reason, reason)
    assert (dict(plan.joins), plan.is_blocked) == ({}, is_blocked)


def test_node_that_prepares_or_spoiled_a_view_is_left_out_if_the_others_are_enough() -> None:
    """With too few others it takes part."""
    nodes = {A: joined(), B: joined(), C: joined(is_preparing=True)}
    backoff = Backoff(3.0)
    for _ in range(3):
        backoff.add(D, NOW)
    situation = replace(make_situation(A, B, C, D, backoff=backoff), nodes={**nodes, D: joined()})
    assert set(situation.plan().joins) == {A, B}
    needed = replace(situation, settings=replace(situation.settings, min_nodes=4))
    assert set(needed.plan().joins) == {A, B, C, D}


@given(
    st.sets(st.sampled_from([A, B, C, D])),
    st.sets(st.sampled_from([A, B, C])),
    st.booleans(),
    st.fixed_dictionaries(
        {
            "unreachable": st.sets(st.sampled_from([A, B, C])),
            "apart": st.sampled_from([frozenset(), APART]),
            "began_at": st.floats(NOW - 60, NOW),
            "last_arrival_at": st.floats(NOW - 60, NOW),
        }
    ),
)
def test_absent_members_do_not_matter_while_votes_are_missing(
    nodes: set[Incarnation], absent: set[Incarnation], has_replaced: bool, fields: dict[str, object]
) -> None:
    """So a leader of thousands, which evaluates often then, does not look for them."""
    situation = make_situation(*sorted(nodes, key=str), missing_votes=VOTES_MISSING, **fields)
    looked = replace(situation, absent=absent, has_replaced=has_replaced)
    assert looked.plan() == replace(situation, absent=set(), has_replaced=False).plan()
