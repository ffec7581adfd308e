"""Who asks for a requeue, and when nobody does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.policy.requeue import (
    MAX_IDLE_RESTARTS,
    Action,
    End,
    Facts,
    Word,
    decide,
    idle_lives,
    margin_s,
)

REQUEUE, TELL, OVER, LEAVE = Action
NOTICE = Facts(End.NOTICE)

TABLE = [
    # the job's own end
    (Facts(End.DONE), LEAVE, 0, "done"),
    (Facts(End.AT_FAULT), LEAVE, 1, "at fault"),
    (Facts(End.INTERRUPTED), LEAVE, 130, "interrupted"),
    # SIGTERM: what the scheduler says decides
    (Facts(End.TERMINATED), LEAVE, 143, "whoever sent SIGTERM"),
    (Facts(End.TERMINATED, mine=False), LEAVE, 143, "asks Slurm why"),
    (Facts(End.TERMINATED, Word.ENDING), LEAVE, 143, "told to end or to requeue"),
    (Facts(End.TERMINATED, Word.PREEMPTED), REQUEUE, 75, "preempted"),
    (Facts(End.TERMINATED, Word.TIME_LIMIT), REQUEUE, 75, "time limit is reached"),
    (Facts(End.TERMINATED, Word.PREEMPTED, mine=False), TELL, 75, "rank 0"),
    # told ahead of time
    (NOTICE, REQUEUE, 75, "ahead of time"),
    (Facts(End.DEADLINE), REQUEUE, 75, "time limit is near"),
    (replace(NOTICE, mine=False), OVER, 0, "rank 0"),
    (replace(Facts(End.DEADLINE), mine=False), TELL, 75, "rank 0"),
    (replace(NOTICE, word=Word.RUNNING), REQUEUE, 75, "ahead of time"),
    (replace(NOTICE, word=Word.ENDING), LEAVE, 1, "told to end"),
    (Facts(End.DEADLINE, Word.ENDING), LEAVE, 1, "told to end"),
    (Facts(End.TERMINATED, Word.RUNNING), LEAVE, 143, "whoever sent SIGTERM"),
    (replace(NOTICE, mine=False, only_here=True), REQUEUE, 75, "ahead of time"),
    (replace(NOTICE, alone=True), TELL, 75, "go on"),  # of rank 0: perhaps the last of all
    (replace(NOTICE, alone=True, mine=False), OVER, 0, "go on"),
    (replace(NOTICE, alone=True, mine=False, idle=9, off=True), OVER, 0, "go on"),
    (replace(NOTICE, alone=True, mine=False, scheduler="kubernetes"), TELL, 75, "exit code"),
    (replace(NOTICE, alone=True, mine=False, scheduler="host"), TELL, 75, "exit code"),
    (replace(NOTICE, alone=True, only_here=True), REQUEUE, 75, "ahead of time"),
    (replace(NOTICE, scheduler="host"), TELL, 75, "exit code"),
    (replace(NOTICE, scheduler="kubernetes", scontrol=False), TELL, 75, "exit code"),
    (replace(NOTICE, scontrol=False), TELL, 75, "batch script"),
    (replace(NOTICE, other="submitit"), TELL, 75, "submitit requeues"),
    (replace(NOTICE, off=True), TELL, 75, "--requeue"),
    # where other nodes may have a world that goes on
    (Facts(End.LOST), TELL, 75, "may go on"),
    (Facts(End.LEFT), TELL, 75, "may go on"),
    (Facts(End.LEFT, mine=False), OVER, 0, "go on"),
    (Facts(End.LEFT, mine=False, scheduler="host"), TELL, 75, "go on"),
    (Facts(End.LOST, mine=False), TELL, 75, "may go on"),
    (Facts(End.LOST, only_here=True), REQUEUE, 75, "no world"),
    (Facts(End.LEFT, only_here=True), REQUEUE, 75, "left"),
    # a job that gets nowhere
    (replace(NOTICE, idle=3), REQUEUE, 75, "ahead"),
    (replace(NOTICE, idle=4), LEAVE, 1, "lived 4 times"),
    (Facts(End.TERMINATED, Word.PREEMPTED, idle=4), LEAVE, 143, "new step"),
    (Facts(End.LOST, idle=4), LEAVE, 1, "new step"),
    (Facts(End.LEFT, idle=4), TELL, 75, "may go on"),
    (Facts(End.LEFT, idle=4, only_here=True), LEAVE, 1, "new step"),
]
OTHERWISE = {End.DONE: 0, End.AT_FAULT: 1, End.INTERRUPTED: 130, End.TERMINATED: 143}


@pytest.mark.parametrize(("facts", "action", "code", "why"), TABLE)
def test_who_asks_for_a_requeue(facts: Facts, action: Action, code: int, why: str) -> None:
    """One row for each rule, with the exit code and what is said."""
    decision = decide(facts)
    assert (decision.action, decision.exit_code(OTHERWISE.get(facts.end, 1))) == (action, code)
    assert why in decision.why


def test_submitit_is_not_raced_by_a_preempted_job() -> None:
    """Whoever manages the job is asked first."""
    assert decide(Facts(End.TERMINATED, Word.PREEMPTED, other="submitit")).action is TELL


all_facts = st.builds(
    Facts,
    end=st.sampled_from(End),
    word=st.sampled_from(Word),
    scheduler=st.sampled_from(["slurm", "kubernetes", "pet", "host"]),
    idle=st.integers(0, 10),
    only_here=st.booleans(),
    mine=st.booleans(),
    alone=st.booleans(),
    other=st.sampled_from(["", "submitit"]),
    scontrol=st.booleans(),
    off=st.booleans(),
)


@given(all_facts)
def test_nothing_that_must_not_happen_happens(facts: Facts) -> None:
    """Rules that hold whatever else is true."""
    decision = decide(facts)
    asks = decision.action is REQUEUE
    code = decision.exit_code(7)
    assert decision.why
    if facts.end in {End.DONE, End.AT_FAULT, End.INTERRUPTED}:
        assert code == 7
    if facts.end is End.TERMINATED and facts.word not in {Word.PREEMPTED, Word.TIME_LIMIT}:
        assert code == 7, "a job that somebody cancelled came back"
    part = facts.scheduler == "slurm" and not facts.only_here and not facts.mine
    if decision.action is OVER:
        assert part, "a job ended as if it were done"
        return
    if facts.word is Word.ENDING:
        assert code == 7, "a job that somebody cancelled came back"
        return
    left_others = facts.end is End.LEFT and not facts.only_here
    if facts.idle > MAX_IDLE_RESTARTS and not left_others:
        assert code == 7, "a job that gets nowhere was started for ever"
    if facts.off or facts.other or not facts.scontrol or facts.scheduler != "slurm":
        assert not asks
    if asks and not facts.only_here:
        assert facts.mine, "two nodes of a job asked"
        assert not facts.alone, "a job that goes on elsewhere was torn down"
        assert facts.end not in {End.LOST, End.LEFT}
    if facts.end in {End.NOTICE, End.DEADLINE} and facts.idle <= MAX_IDLE_RESTARTS:
        assert code == 75, "a job that was not done ended for good"


@given(all_facts)
def test_of_several_nodes_one_asks_at_most(facts: Facts) -> None:
    """The same end of all nodes: only the one that speaks for all may ask."""
    others = replace(facts, mine=False, only_here=False)
    assert decide(others).action is not REQUEUE


@pytest.mark.parametrize(
    ("grace_s", "commit_s", "life_s", "expected"),
    [
        (5, 0.0, 3600, 20),  # nothing is known of commits yet
        (5, 4.9, 3600, 20),
        (5, 5.1, 3600, 30),
        (60, 25.0, 86400, 145),
        (5, 1e9, 1e9, 5130),
        (5, 0.0, 30, 15),  # a short life is half the job's
        (5, 0.0, -1, 0),
    ],
)
def test_a_drain_begins_early_enough_for_a_commit(
    grace_s: float, commit_s: float, life_s: float, expected: float
) -> None:
    """In steps, so that nodes whose commits take about as long begin together."""
    assert margin_s(grace_s, commit_s, life_s) == expected


def lives(text: str) -> list[dict[str, Any]]:
    """Events of a node: A a life begins, wN workers start at step N, sN step N is finished, c a commit."""
    kinds = {"A": "agent-start", "w": "worker-start", "s": "step", "c": "commit", "x": "failure"}
    return [
        {"event": kinds[word[0]], **({"step": int(word[1:])} if word[1:] else {})} for word in text.split()
    ]


@pytest.mark.parametrize(
    ("text", "restarts", "expected"),
    [
        ("A w0 s1", 0, 0),
        ("A w0", 0, 1),
        ("A", 5, 1),
        ("A w0 s1 s9 A A w9 A w9", 3, 3),
        ("A w0 s1 A w1 A w1 s2", 2, 0),
        ("A w0 s1 A w1 c1 x", 1, 1),  # what it began with is no new step
        ("A w5 s6 w3 s4 A c6", 1, 1),
        ("A w5 w3 s4", 0, 0),  # a replayed step is one: the job went back, and on
        ("A A A A A A", 1, 2),  # of other jobs of the name
        ("", 0, 0),
    ],
)
def test_idle_lives_are_counted_from_a_nodes_events(text: str, restarts: int, expected: int) -> None:
    """Only those in a row, back to the last that brought a step."""
    assert idle_lives(lives(text), restarts) == expected
