"""The quorum rules by table, and what merging quorum states must not lose."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.rendezvous.core.quorum import (
    Incarnation,
    MissingQuorum,
    QuorumState,
    View,
    find_missing_quorum,
    has_quorum,
)

A, B, C, D, E = (
    Incarnation(name, "1", f"{name}:1", candidate_index=place if place < 3 else None)
    for place, name in enumerate("abcde")
)
A2 = Incarnation("a", "2", "a:1", candidate_index=0)


def view(generation: int, *members: Incarnation) -> View:
    """Return a view that its rank 0 proposed."""
    return View(generation, members, members[0])


def make_state(
    installed: View | None = None,
    *proposals: View,
    dead: tuple[Incarnation, ...] = (),
    candidates: int = 3,
    forced: int = 0,
) -> QuorumState:
    """Return a quorum state, with three candidates by default."""
    return QuorumState(candidates, installed, proposals, frozenset(dead), forced_generation=forced)


FIVE = view(1, A, B, C, D, E)
TABLE = [
    ("two of three candidates form the first view", (A, C), make_state(), True),
    ("one of three candidates does not", (A, D, E), make_state(), False),
    ("one candidate is enough where there is one", (A,), make_state(candidates=1), True),
    ("nodes that are no candidates are not enough", (D, E), make_state(candidates=1), False),
    ("a restarted candidate is a candidate", (A2, B), make_state(), True),
    ("one node at two addresses is counted by address", (A, A2), make_state(), False),
    ("more than half of the last view", (C, D, E), make_state(FIVE), True),
    ("less than half of it", (A, B), make_state(FIVE), False),
    ("an exact half with the lowest rank", (A, D), make_state(view(1, A, B, C, D)), True),
    ("an exact half without it", (C, D), make_state(view(1, A, B, C, D)), False),
    ("the lowest rank that is not dead", (B, C), make_state(FIVE, dead=(A,)), True),
    ("the dead do not count", (E,), make_state(FIVE, dead=(A, B, C, D)), True),
    ("the dead do not vote", (A, B, C), make_state(FIVE, dead=(A, B)), False),
    ("a new process does not vote for the former one", (A2, C), make_state(view(1, A, B, C)), False),
    ("if all are dead the candidates decide", (A2, B), make_state(view(1, A), dead=(A,)), True),
    ("if all are dead one candidate is too few", (A2,), make_state(view(1, A), dead=(A,)), False),
    ("a later proposal must agree too", (A, B, C), make_state(FIVE, view(2, C, D, E)), False),
    ("a later proposal may agree", (B, C, D), make_state(FIVE, view(2, C, D, E)), True),
    ("a forced view need not agree", (E,), make_state(FIVE, forced=1), True),
    ("nor need its restarted members", (A2,), make_state(FIVE, dead=(A,), forced=1), True),
    (
        "a proposal after the forced view must agree",
        (A,),
        make_state(FIVE, view(2, C, D, E), forced=1),
        False,
    ),
    ("a proposal for the first view must agree", (B, C), make_state(None, view(1, A, B)), False),
    ("a proposal of the first view does not waive its rule", (B,), make_state(None, view(1, B)), False),
]


@pytest.mark.parametrize(
    ("name", "present", "quorum_state", "expected"), TABLE, ids=[row[0] for row in TABLE]
)
def test_quorum(
    name: str, present: tuple[Incarnation, ...], quorum_state: QuorumState, expected: bool
) -> None:
    """Rule 3, one case a row."""
    del name
    assert has_quorum(present, quorum_state) is expected


def test_two_disjoint_sets_with_one_quorum_state_never_both_have_a_quorum() -> None:
    """Two sides of a partition that know the same do not both continue."""
    everyone = (A, B, C, D, E)
    for dead in itertools.chain.from_iterable(itertools.combinations(everyone, n) for n in range(5)):
        state = make_state(FIVE, dead=dead)
        for size in range(6):
            for side in itertools.combinations(everyone, size):
                other = tuple(one for one in everyone if one not in side)
                assert not (has_quorum(side, state) and has_quorum(other, state)), (side, dead)


def test_missing_quorum_names_the_missing_members() -> None:
    """The message says how many votes are here and whose are missing."""
    missing = find_missing_quorum((A, B), make_state(FIVE))
    assert str(missing) == (
        "generation 1 may still run elsewhere: 2 of the 3 required votes are here; waiting for c, d, e "
        "(if dead for good: elastic-resume force-quorum)"
    )
    assert str(find_missing_quorum((A,), make_state())) == "1 of the 2 candidates required to start are here"


def test_aborted_proposal_needs_no_votes() -> None:
    """It can never be installed."""
    late = view(2, A, D, E)
    state = make_state(view(1, A), late)
    assert not has_quorum((A,), state)
    assert has_quorum((A,), state.with_aborted(late))
    assert has_quorum((A,), state.merge(state.with_aborted(late)))


def test_installed_view_removes_earlier_proposals_and_deaths() -> None:
    """So the quorum state stays small."""
    state = make_state(FIVE, view(2, C, D, E), dead=(A, B)).with_installed(view(3, C, D))
    assert state == make_state(view(3, C, D))


def test_forced_generation_is_cleared_by_a_later_view() -> None:
    """Until then it is merged like the rest of the state."""
    forced = make_state(FIVE, forced=1)
    assert make_state(FIVE).merge(forced) == forced == forced.prune()
    assert forced.with_installed(view(2, A)).forced_generation == 0
    assert forced.merge(make_state(view(2, C, D, E))) == make_state(view(2, C, D, E))


def test_next_incarnation_differs_and_keeps_the_address() -> None:
    """A live node that was declared dead continues as a new incarnation."""
    again = A.next_incarnation()
    assert again not in (A, A2)
    assert again.next_incarnation() not in (A, again)
    assert (again.node, again.address, again.candidate_index) == ("a", "a:1", 0)


members = st.sampled_from((A, B, C, D, E))
views = st.builds(
    lambda generation, members: view(generation, *members),
    st.integers(1, 4),
    st.lists(members, min_size=1, max_size=5, unique=True),
)
quorum_states = st.builds(
    lambda proposals, dead: make_state(None, *proposals, dead=tuple(dead)).prune(),
    st.lists(views, max_size=3, unique_by=lambda view: (view.generation, view.leader)),
    st.lists(members, unique=True),
)


@given(quorum_states, quorum_states)
def test_merge_is_commutative_and_idempotent(first: QuorumState, second: QuorumState) -> None:
    """Quorum states may arrive twice and in any order."""
    both = first.merge(second)
    assert set(both.proposals) == set(second.merge(first).proposals)
    assert both.dead >= (first.dead | second.dead) & {m for w in both.voting_views for m in w.members}
    assert both.merge(first) == both == both.merge(second)


@pytest.mark.parametrize("count", [1, 3, 16, 20])
def test_report_reads_missing_nodes_from_the_clause(count: int) -> None:
    """An event has only the clause; it names 16 nodes at most."""
    members = tuple(Incarnation(f"n{index:02}", "1") for index in range(count))
    names = tuple(member.node for member in members[:16])
    assert MissingQuorum.parse_missing_names(str(MissingQuorum(7, 1, 3, members))) == names
    assert MissingQuorum.parse_missing_names(str(MissingQuorum(0, 1, 2, ()))) == ()
