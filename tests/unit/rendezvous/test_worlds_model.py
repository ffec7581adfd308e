"""Check the rule that decides the sequence of worlds, and that it needs each of its clauses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.worlds_model import Config, Model, State, explore, show

TWO_NODES = Config(nodes=2, crashes=2)
FOUR_NODES = Config(nodes=4, owners=("H", "*"), end=False)
HANDOVER = Config(nodes=3, strict=True, handover=True, crashes=0, end=False)
STRICT = Config(nodes=2, crashes=0, strict=True)
TWO_SLOTS = Config(nodes=2, newcomers=1, slots=2, ballots=(2, 1))
EMPTY_DISK = Config(nodes=2, lost=1, ballots=(2, 2), end=False)
HANDED_TO_LOST = Config(
    nodes=2, lost=1, ballots=(2,), end=False, replaced=True, known_losses=True, handover=True
)
FIRST_WORLD = Config(nodes=3, first=True, strict=True, lost=1, ballots=(2, 1), end=False)


def change(config: Config, **changes: Any) -> Config:
    """Return a configuration with other options."""
    return Config(**{**config.__dict__, **changes})


# Parts of TWO_NODES, so what breaks an invariant in one is not the part's fault.
HEIR_FIRST = change(TWO_NODES, owners=("H", "*"), end=False)
LEADER_FIRST = change(TWO_NODES, owners=("L", "*"), end=False)


@pytest.mark.parametrize(
    "config",
    [
        TWO_NODES,
        Config(nodes=3, strict=True, crashes=3, owners=("*",), ballots=(1,)),
        Config(nodes=3, owners=("L", "H")),
        change(HANDOVER, nodes=2, crashes=1),
        change(TWO_SLOTS, owners=("LH", "H*")),
        change(EMPTY_DISK, replaced=True, known_losses=True),
    ],
)
def test_rule_explored_completely_keeps_its_invariants(config: Config) -> None:
    """Explore what takes seconds."""
    result = explore(config)

    assert result.violation == "", result.trace
    assert result.complete


@pytest.mark.soak
@pytest.mark.parametrize(
    "config",
    [
        Config(nodes=2, crashes=2, late=True),
        Config(nodes=2, handover=True, end=False),
        Config(nodes=3, strict=True),
        Config(nodes=3),
        Config(nodes=3, late=True),
        Config(nodes=3, leader=1),
        Config(nodes=3, crashes=2),
        Config(nodes=3, slots=2, ballots=(2, 1)),
        change(TWO_SLOTS, crashes=2),
        Config(nodes=3, strict=True, slots=2),
        Config(nodes=4, strict=True),
        Config(nodes=4),
        change(HANDOVER, crashes=0),
        change(HANDOVER, crashes=1),
        Config(nodes=3, handover=True, end=False),
        Config(nodes=2, replaced=True, known_losses=True, lost=1, crashes=2),
        change(TWO_SLOTS, replaced=True, known_losses=True, lost=1, end=False, owners=("L", "H")),
        HANDED_TO_LOST,
        change(HANDED_TO_LOST, late_votes=True),
        change(HANDED_TO_LOST, crashes=2),
        change(HANDED_TO_LOST, nodes=3, owners=("H", "L")),
        change(HANDED_TO_LOST, nodes=3, owners=("L", "H")),
    ],
)
def test_larger_configuration_explored_completely_keeps_its_invariants(config: Config) -> None:
    """Explore what takes minutes."""
    result = explore(config)

    assert result.violation == "", result.trace
    assert result.complete


@pytest.mark.parametrize(
    ("clause", "value", "config"),
    [
        ("half_with_leader", False, STRICT),
        ("stop_on_join", False, STRICT),
        ("repropose", "never", STRICT),
        ("end_decided", False, STRICT),
        ("members_only", False, change(STRICT, newcomers=1)),
        ("durable_promise", False, change(STRICT, crashes=1)),
        ("durable_accept", False, change(STRICT, crashes=1)),
        ("by_disk", False, change(EMPTY_DISK, strict=True, ballots=(2,))),
        ("durable_handing", False, change(HANDOVER, nodes=2, crashes=1)),
        ("handed_once", False, change(HANDOVER, nodes=2, crashes=1)),
        ("ties_only", False, change(FOUR_NODES, nodes=3)),
        pytest.param("half_repeats", False, FOUR_NODES, marks=pytest.mark.soak),
        pytest.param("only_heir_takes", False, FOUR_NODES, marks=pytest.mark.soak),  # a minute
        ("take_alive", False, LEADER_FIRST),
        ("leader_window", False, HEIR_FIRST),
        ("accept_before_send", False, HEIR_FIRST),
        ("leader_waits_for_heir", False, LEADER_FIRST),
        ("leader_waits_elsewhere", False, HEIR_FIRST),
        ("restarted_leader", False, HEIR_FIRST),
    ],
)
def test_rule_without_clause_breaks_an_invariant(clause: str, value: object, config: Config) -> None:
    """Take one clause out, where the counterexample is shallow."""
    assert explore(change(config, **{clause: value})).violation


WITHOUT_B = """c joins ballot 2 a; a joins ballot 2 a; proposal in ballot 2 a world 2 {a c};
    a accepts in ballot 2 a world 2 {a c} after; a learns; c learns; a crashes;
    c takes the vote of a; c joins ballot 1 c;
    proposal in ballot 1 c world 3 {c}; c accepts in ballot 1 c; c learns world 3;
    a restarts with an empty disk; a~1 learns world 1; a~1 joins ballot 1 b;
    proposal in ballot 1 b world 2;"""
WITH_B = "b accepts in ballot 1 b world 2; b learns world 2 {b a; a~1 learns world 2 {b a;"
TWICE = """a joins ballot 1 a; b joins ballot 1 a; proposal in ballot 1 a world 1 {a b};
    a accepts in ballot 1; b accepts in ballot 1; a learns; b crashes; a joins ballot 1 a;
    proposal in ballot 1 a world 2 {a};
    a accepts in ballot 1; a learns world 2; b restarts with an empty disk; b~1 joins ballot 2 c;
    c joins ballot 2 c; proposal in ballot 2 c world 1 {b~1 c}; c accepts in ballot 2;
    b~1 accepts in ballot 2; c learns world 1 {b~1 c}; b~1 learns world 1 {b~1 c};"""
LATE_HAND = """a joins ballot 1 a; b joins ballot 1 a; b hands its vote to a; b joins ballot 2 b;
    c joins ballot 2 b; proposal in ballot 1 a world 2 {value 1}; a accepts in ballot 1; a joins ballot 2 b;
    a has got the vote of b; proposal in ballot 2 b world 2 {value 2}; a accepts in ballot 2 b;"""
TWO_BALLOTS = """a joins ballot 1 a; b joins ballot 2 a; b hands its vote to a; c joins ballot 2 a;
    a has got the vote of b; proposal in ballot 1 a world 2 {value 1}; a accepts in ballot 1;
    proposal in ballot 2 a world 2 {value 2}; a accepts in ballot 2;"""
HAND_ACCEPTED = """a joins ballot 1 a; c joins ballot 1 a; proposal in ballot 1 a world 2;
    a accepts in ballot 1; c accepts in ballot 1; b joins ballot 2 b; c joins ballot 2 b;
    c hands its vote to b; b has got the vote of c; b joins ballot 3 b;
    proposal in ballot 3 b world 2 {value 3}; b accepts in ballot 3;"""
LOST_HOLDER = """a joins ballot 1 b; b joins ballot 1 b; a hands its vote to b; b has got the vote of a;
    b crashes; b restarts with an empty disk; b~1 learns; a joins ballot 2 a; b~1 joins ballot 2 a;"""
AFTER_LOST_HOLDER = "proposal in ballot 2 a world 2; a accepts in ballot 2 a; a learns world 2 {a b~1};"
LOST = change(EMPTY_DISK, newcomers=1, slots=2, check_i1=False)


def play(model: Model, schedule: str) -> State:
    """Play a schedule, and return its last state: each time the shortest step that begins so."""
    state = model.first
    for words in schedule.rstrip(";").split(";"):
        wanted = " ".join(words.split())
        steps = [(" ".join(filter(None, map(show, what))), after) for what, after in model.steps(state)]
        found = [step for step in steps if step[0].startswith(wanted)]
        assert found, (wanted, sorted(step[0] for step in steps))
        state = min(found, key=lambda step: len(step[0]))[1]
    return state


@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        # The members that are left count, though a had passed the job on to c before its disk was lost.
        (change(LOST, replaced=True), "b joins ballot 1 b;" + WITHOUT_B + WITH_B),
        # An empty disk votes a second time for the first world.
        (change(FIRST_WORLD, slots=2, check_i1=False), TWICE),
        # A vote is taken over after its holder has promised a later ballot.
        (change(HANDOVER, handed_in_ballot=False), LATE_HAND),
        # The owner of two ballots takes a vote over in the older one.
        (change(HANDOVER, own_promise=False), TWO_BALLOTS),
        # What the giver has accepted is lost.
        (change(HANDOVER, ballots=(3,), handed_accepted=False), HAND_ACCEPTED),
    ],
    ids=["replaced", "first world", "handed_in_ballot", "own_promise", "handed_accepted"],
)
def test_rule_without_clause_makes_two_worlds(config: Config, schedule: str) -> None:
    """Play a counterexample that is too deep for a search."""
    model = Model(config)
    state = play(model, schedule)

    assert model.violation(state) in {"I1: a slot is decided with two values", "I2: two worlds are whole"}


def test_vote_handed_to_a_lost_disk_is_its_givers_again() -> None:
    """The giver and the empty disk decide the next world; without the clause nobody ever does."""
    model = Model(HANDED_TO_LOST)
    assert not model.violation(play(model, LOST_HOLDER + AFTER_LOST_HOLDER))

    without = Model(change(HANDED_TO_LOST, handed_back=False))
    steps = without.steps(play(without, LOST_HOLDER))
    assert "proposal in ballot" not in [what[0] for what, _ in steps]
