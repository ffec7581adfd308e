"""Test which node requests a requeue, and when none does."""

from __future__ import annotations

import functools
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
ALONE: dict[str, Any] = {"only_this_node_ends": True, "is_requester": False}
facts, End, Reason = RequeueFacts, AgentEnd, TerminationReason
notice = functools.partial(RequeueFacts, AgentEnd.PREEMPTION_NOTICE)

TABLE = [
    # the job's own end
    (facts(End.DONE), LEAVE, 0, "done"),
    (facts(End.DETERMINISTIC_FAILURE), LEAVE, 1, "at fault"),
    (facts(End.INTERRUPTED), LEAVE, 130, "interrupted"),
    # SIGTERM: what the scheduler says decides
    (facts(End.TERMINATED), LEAVE, 143, "the sender of SIGTERM"),
    (facts(End.TERMINATED, is_requester=False), LEAVE, 143, "asks Slurm why"),
    (facts(End.TERMINATED, Reason.JOB_ENDING), LEAVE, 143, "told to end or to requeue"),
    (facts(End.TERMINATED, Reason.PREEMPTED), REQUEUE, 75, "preempted"),
    (facts(End.TERMINATED, Reason.TIME_LIMIT), REQUEUE, 75, "time limit is reached"),
    (facts(End.TERMINATED, Reason.PREEMPTED, is_requester=False), TELL, 75, "rank 0"),
    # told ahead of time
    (notice(), REQUEUE, 75, "ahead of time"),
    (facts(End.DEADLINE), REQUEUE, 75, "time limit is near"),
    (notice(is_requester=False), OVER, 0, "rank 0"),
    (facts(End.DEADLINE, is_requester=False), TELL, 75, "rank 0"),
    (notice(termination_reason=Reason.RUNNING), REQUEUE, 75, "ahead of time"),
    (notice(termination_reason=Reason.JOB_ENDING), LEAVE, 1, "told to end"),
    (facts(End.DEADLINE, Reason.JOB_ENDING), LEAVE, 1, "told to end"),
    (facts(End.TERMINATED, Reason.RUNNING), LEAVE, 143, "the sender of SIGTERM"),
    (notice(is_requester=False, is_single_node=True), REQUEUE, 75, "ahead of time"),
    (notice(only_this_node_ends=True), TELL, 75, "continue"),  # of rank 0: perhaps the last of all
    (notice(**ALONE), OVER, 0, "continue"),
    (notice(**ALONE, starts_without_progress=9, is_disabled=True), OVER, 0, "continue"),
    (notice(**ALONE, scheduler="kubernetes"), TELL, 75, "exit code"),
    (notice(**ALONE, scheduler="host"), TELL, 75, "exit code"),
    (notice(only_this_node_ends=True, is_single_node=True), REQUEUE, 75, "ahead of time"),
    (notice(scheduler="host"), TELL, 75, "exit code"),
    (notice(scheduler="kubernetes", has_scontrol=False), TELL, 75, "exit code"),
    (notice(has_scontrol=False), TELL, 75, "batch script"),
    (notice(other_requeuer="submitit"), TELL, 75, "submitit requeues"),
    (notice(is_disabled=True), TELL, 75, "ELASTIC_RESUME_REQUEUE"),
    (facts(End.TERMINATED, Reason.PREEMPTED, other_requeuer="submitit"), TELL, 75, "submitit requeues"),
    # where other nodes may have a world that goes on
    (facts(End.NO_QUORUM), TELL, 75, "may continue"),
    (facts(End.NODE_UNFIT), TELL, 75, "may continue"),
    (facts(End.NODE_UNFIT, is_requester=False), OVER, 0, "continue"),
    (facts(End.NODE_UNFIT, is_requester=False, scheduler="host"), TELL, 75, "continue"),
    (facts(End.NO_QUORUM, is_requester=False), TELL, 75, "may continue"),
    (facts(End.NO_QUORUM, is_single_node=True), REQUEUE, 75, "no world"),
    (facts(End.NODE_UNFIT, is_single_node=True), REQUEUE, 75, "left"),
    # a job that gets nowhere
    (notice(starts_without_progress=3), REQUEUE, 75, "ahead"),
    (notice(starts_without_progress=4), LEAVE, 1, "lived 4 times"),
    (facts(End.TERMINATED, Reason.PREEMPTED, starts_without_progress=4), LEAVE, 143, "new step"),
    (facts(End.NO_QUORUM, starts_without_progress=4), LEAVE, 1, "new step"),
    (facts(End.NODE_UNFIT, starts_without_progress=4), TELL, 75, "may continue"),
    (facts(End.NODE_UNFIT, starts_without_progress=4, is_single_node=True), LEAVE, 1, "new step"),
]
OTHERWISE = {
    AgentEnd.DONE: 0,
    AgentEnd.DETERMINISTIC_FAILURE: 1,
    AgentEnd.INTERRUPTED: 130,
    AgentEnd.TERMINATED: 143,
}


@pytest.mark.parametrize(("facts", "action", "code", "why"), TABLE)
def test_requeue_decision_has_action_code_and_reason(
    facts: RequeueFacts, action: RequeueAction, code: int, why: str
) -> None:
    """Each rule has a row."""
    decision = decide_requeue(facts)
    assert (decision.action, decision.exit_code(OTHERWISE.get(facts.end, 1))) == (action, code)
    assert why in decision.reason


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
def test_any_facts_keep_requeue_rules(facts: RequeueFacts) -> None:
    """Some outcomes are excluded whatever else is true."""
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
def test_node_that_is_not_requester_never_requeues(facts: RequeueFacts) -> None:
    """Two nodes of a job would requeue it twice."""
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
def test_drain_margin_covers_commit(grace_s: float, commit_s: float, life_s: float, expected: float) -> None:
    """The margin has steps, so nodes with similar commits drain together."""
    assert drain_margin_s(grace_s, commit_s, life_s) == expected


def starts(text: str) -> list[dict[str, Any]]:
    """Return events of a node: A agent start, wN workers start at step N, sN step N finished, c commit."""
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
def test_starts_without_progress_are_counted_in_a_row(text: str, restarts: int, expected: int) -> None:
    """Only starts since the last new step count."""
    assert count_starts_without_progress(starts(text), restarts) == expected
