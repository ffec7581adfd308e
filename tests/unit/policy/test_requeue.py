"""Who asks for a requeue, and when nobody does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.policy.requeue import (
    MAX_STARTS_WITHOUT_PROGRESS,
    AgentEnd,
    RequeueAction,
    RequeueFacts,
    TerminationReason,
    count_starts_without_progress,
    decide_requeue,
    drain_margin_s,
)

REQUEUE, TELL, OVER, LEAVE = RequeueAction
NOTICE = RequeueFacts(AgentEnd.PREEMPTION_NOTICE)

TABLE = [
    # the job's own end
    (RequeueFacts(AgentEnd.DONE), LEAVE, 0, "done"),
    (RequeueFacts(AgentEnd.DETERMINISTIC_FAILURE), LEAVE, 1, "at fault"),
    (RequeueFacts(AgentEnd.INTERRUPTED), LEAVE, 130, "interrupted"),
    # SIGTERM: what the scheduler says decides
    (RequeueFacts(AgentEnd.TERMINATED), LEAVE, 143, "whoever sent SIGTERM"),
    (RequeueFacts(AgentEnd.TERMINATED, is_requester=False), LEAVE, 143, "asks Slurm why"),
    (
        RequeueFacts(AgentEnd.TERMINATED, TerminationReason.JOB_ENDING),
        LEAVE,
        143,
        "told to end or to requeue",
    ),
    (RequeueFacts(AgentEnd.TERMINATED, TerminationReason.PREEMPTED), REQUEUE, 75, "preempted"),
    (RequeueFacts(AgentEnd.TERMINATED, TerminationReason.TIME_LIMIT), REQUEUE, 75, "time limit is reached"),
    (RequeueFacts(AgentEnd.TERMINATED, TerminationReason.PREEMPTED, is_requester=False), TELL, 75, "rank 0"),
    # told ahead of time
    (NOTICE, REQUEUE, 75, "ahead of time"),
    (RequeueFacts(AgentEnd.DEADLINE), REQUEUE, 75, "time limit is near"),
    (replace(NOTICE, is_requester=False), OVER, 0, "rank 0"),
    (replace(RequeueFacts(AgentEnd.DEADLINE), is_requester=False), TELL, 75, "rank 0"),
    (replace(NOTICE, termination_reason=TerminationReason.RUNNING), REQUEUE, 75, "ahead of time"),
    (replace(NOTICE, termination_reason=TerminationReason.JOB_ENDING), LEAVE, 1, "told to end"),
    (RequeueFacts(AgentEnd.DEADLINE, TerminationReason.JOB_ENDING), LEAVE, 1, "told to end"),
    (RequeueFacts(AgentEnd.TERMINATED, TerminationReason.RUNNING), LEAVE, 143, "whoever sent SIGTERM"),
    (replace(NOTICE, is_requester=False, is_single_node=True), REQUEUE, 75, "ahead of time"),
    (replace(NOTICE, only_this_node_ends=True), TELL, 75, "go on"),  # of rank 0: perhaps the last of all
    (replace(NOTICE, only_this_node_ends=True, is_requester=False), OVER, 0, "go on"),
    (
        replace(
            NOTICE, only_this_node_ends=True, is_requester=False, starts_without_progress=9, is_disabled=True
        ),
        OVER,
        0,
        "go on",
    ),
    (
        replace(NOTICE, only_this_node_ends=True, is_requester=False, scheduler="kubernetes"),
        TELL,
        75,
        "exit code",
    ),
    (replace(NOTICE, only_this_node_ends=True, is_requester=False, scheduler="host"), TELL, 75, "exit code"),
    (replace(NOTICE, only_this_node_ends=True, is_single_node=True), REQUEUE, 75, "ahead of time"),
    (replace(NOTICE, scheduler="host"), TELL, 75, "exit code"),
    (replace(NOTICE, scheduler="kubernetes", has_scontrol=False), TELL, 75, "exit code"),
    (replace(NOTICE, has_scontrol=False), TELL, 75, "batch script"),
    (replace(NOTICE, other_requeuer="submitit"), TELL, 75, "submitit requeues"),
    (replace(NOTICE, is_disabled=True), TELL, 75, "--requeue"),
    # where other nodes may have a world that goes on
    (RequeueFacts(AgentEnd.NO_QUORUM), TELL, 75, "may go on"),
    (RequeueFacts(AgentEnd.NODE_UNFIT), TELL, 75, "may go on"),
    (RequeueFacts(AgentEnd.NODE_UNFIT, is_requester=False), OVER, 0, "go on"),
    (RequeueFacts(AgentEnd.NODE_UNFIT, is_requester=False, scheduler="host"), TELL, 75, "go on"),
    (RequeueFacts(AgentEnd.NO_QUORUM, is_requester=False), TELL, 75, "may go on"),
    (RequeueFacts(AgentEnd.NO_QUORUM, is_single_node=True), REQUEUE, 75, "no world"),
    (RequeueFacts(AgentEnd.NODE_UNFIT, is_single_node=True), REQUEUE, 75, "left"),
    # a job that gets nowhere
    (replace(NOTICE, starts_without_progress=3), REQUEUE, 75, "ahead"),
    (replace(NOTICE, starts_without_progress=4), LEAVE, 1, "lived 4 times"),
    (
        RequeueFacts(AgentEnd.TERMINATED, TerminationReason.PREEMPTED, starts_without_progress=4),
        LEAVE,
        143,
        "new step",
    ),
    (RequeueFacts(AgentEnd.NO_QUORUM, starts_without_progress=4), LEAVE, 1, "new step"),
    (RequeueFacts(AgentEnd.NODE_UNFIT, starts_without_progress=4), TELL, 75, "may go on"),
    (RequeueFacts(AgentEnd.NODE_UNFIT, starts_without_progress=4, is_single_node=True), LEAVE, 1, "new step"),
]
OTHERWISE = {
    AgentEnd.DONE: 0,
    AgentEnd.DETERMINISTIC_FAILURE: 1,
    AgentEnd.INTERRUPTED: 130,
    AgentEnd.TERMINATED: 143,
}


@pytest.mark.parametrize(("facts", "action", "code", "why"), TABLE)
def test_who_asks_for_a_requeue(facts: RequeueFacts, action: RequeueAction, code: int, why: str) -> None:
    """One row for each rule, with the exit code and what is said."""
    decision = decide_requeue(facts)
    assert (decision.action, decision.exit_code(OTHERWISE.get(facts.end, 1))) == (action, code)
    assert why in decision.reason


def test_submitit_is_not_raced_by_a_preempted_job() -> None:
    """Whoever manages the job is asked first."""
    assert (
        decide_requeue(
            RequeueFacts(AgentEnd.TERMINATED, TerminationReason.PREEMPTED, other_requeuer="submitit")
        ).action
        is TELL
    )


all_facts = st.builds(
    RequeueFacts,
    end=st.sampled_from(AgentEnd),
    termination_reason=st.sampled_from(TerminationReason),
    scheduler=st.sampled_from(["slurm", "kubernetes", "pet", "host"]),
    starts_without_progress=st.integers(0, 10),
    is_single_node=st.booleans(),
    is_requester=st.booleans(),
    only_this_node_ends=st.booleans(),
    other_requeuer=st.sampled_from(["", "submitit"]),
    has_scontrol=st.booleans(),
    is_disabled=st.booleans(),
)


@given(all_facts)
def test_nothing_that_must_not_happen_happens(facts: RequeueFacts) -> None:
    """Rules that hold whatever else is true."""
    decision = decide_requeue(facts)
    asks = decision.action is REQUEUE
    code = decision.exit_code(7)
    assert decision.reason
    if facts.end in {AgentEnd.DONE, AgentEnd.DETERMINISTIC_FAILURE, AgentEnd.INTERRUPTED}:
        assert code == 7
    if facts.end is AgentEnd.TERMINATED and facts.termination_reason not in {
        TerminationReason.PREEMPTED,
        TerminationReason.TIME_LIMIT,
    }:
        assert code == 7, "a job that somebody cancelled came back"
    part = facts.scheduler == "slurm" and not facts.is_single_node and not facts.is_requester
    if decision.action is OVER:
        assert part, "a job ended as if it were done"
        return
    if facts.termination_reason is TerminationReason.JOB_ENDING:
        assert code == 7, "a job that somebody cancelled came back"
        return
    left_others = facts.end is AgentEnd.NODE_UNFIT and not facts.is_single_node
    if facts.starts_without_progress > MAX_STARTS_WITHOUT_PROGRESS and not left_others:
        assert code == 7, "a job that gets nowhere was started for ever"
    if facts.is_disabled or facts.other_requeuer or not facts.has_scontrol or facts.scheduler != "slurm":
        assert not asks
    if asks and not facts.is_single_node:
        assert facts.is_requester, "two nodes of a job asked"
        assert not facts.only_this_node_ends, "a job that goes on elsewhere was torn down"
        assert facts.end not in {AgentEnd.NO_QUORUM, AgentEnd.NODE_UNFIT}
    if (
        facts.end in {AgentEnd.PREEMPTION_NOTICE, AgentEnd.DEADLINE}
        and facts.starts_without_progress <= MAX_STARTS_WITHOUT_PROGRESS
    ):
        assert code == 75, "a job that was not done ended for good"


@given(all_facts)
def test_of_several_nodes_one_asks_at_most(facts: RequeueFacts) -> None:
    """The same end of all nodes: only the one that speaks for all may ask."""
    others = replace(facts, is_requester=False, is_single_node=False)
    assert decide_requeue(others).action is not REQUEUE


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
    assert drain_margin_s(grace_s, commit_s, life_s) == expected


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
    assert count_starts_without_progress(lives(text), restarts) == expected
