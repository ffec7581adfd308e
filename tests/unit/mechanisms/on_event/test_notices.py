"""Which events become notices, and what is in them."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_resume.events import Event
from elastic_resume.mechanisms.on_event.notices import NoticeMaker, mask
from elastic_resume.policy.failure_classification import EXIT, NODE_LOST, Failure, WorkerEnd
from elastic_resume.policy.reasons import JobFinished, Loss, NodeLost, to_json
from elastic_resume.policy.restart import Continue, GaveUp, RestartsExhausted
from elastic_resume.report.alerts import summarize_event

FAILURE = Failure(EXIT, "n1", 1, WorkerEnd(7))


def make_notices(*events: Event) -> list[dict[str, Any]]:
    """Return the notices of n0 for a job that has begun its first generation."""
    maker = NoticeMaker(summarize_event)
    begin: list[Event] = [
        {"event": "agent-start", "run_id": "job"},
        {"event": "generation-start", "generation": 1, "begins_job": True},
    ]
    made = (maker.make({"t": 5.0, "node": "n0", **event}) for event in [*begin, *events])
    return [notice for notice in made if notice is not None]


def verdict(**fields: Any) -> Event:
    """Return the verdict on the first generation, which the node reports."""
    common = {"generation": 1, "next_generation": 2, "speaks_for_job": True, "reason": None}
    empty: Event = {"joined": [], "lost": [], "root_causes": [], "secondary_failures": []}
    return {"event": "verdict", **common, **empty, "decision": to_json(Continue()), **fields}


def test_failure_has_root_cause_and_reports_sentence() -> None:
    """The members are those of docs/guides/notifications.md."""
    (notice,) = make_notices(verdict(root_causes=to_json((FAILURE,))))
    facts = notice.pop("facts")
    assert notice == {
        "version": 1,
        "kind": "failure",
        "severity": "bad",
        "text": "rank 1 on node n1 ended with exit code 7",
        "run_id": "job",
        "node": "n0",
        "t": 5.0,
        "generation": 1,
        "step": None,
        "restarts": 1,
        "root_cause": {
            "node": "n1", "rank": 1, "kind": "exit", "type": "", "message": "", "exit_code": 7, "signal": None
        },
        "event": "verdict",
    }  # fmt: skip
    assert facts["decision"]["kind"] == "continue"


@pytest.mark.parametrize(
    "fields",
    [
        {"speaks_for_job": False, "root_causes": to_json((FAILURE,))},
        {"next_generation": None, "root_causes": to_json((FAILURE,))},  # the agent's end follows
        {"joined": ["n3"]},
    ],
)
def test_verdict_is_no_failure(fields: Event) -> None:
    """Another node reports it, this node ends, or nodes have joined."""
    assert make_notices(verdict(**fields)) == []


def test_lost_node_is_failure() -> None:
    """As the report names it."""
    lost = Failure(NODE_LOST, "n1", None, NodeLost("n1", Loss.DIED))
    (notice,) = make_notices(verdict(root_causes=to_json((lost,)), lost=["n1"]))
    assert notice["text"] == "node n1 died"
    assert notice["root_cause"]["node"] == "n1"


WENT_BACK = "; it went back as --resume-from best asks, 7 newer steps given up"


def test_resume_is_start_then_recovery() -> None:
    """A first generation that resumes a checkpoint is a start too."""
    resume = {"event": "resume", "world_size": 4, "nodes": ["n0", "n1"]}
    begin = {"event": "generation-start", "generation": 2, "begins_job": False}
    notices = make_notices(
        {**resume, "generation": 1, "step": 0, "kind": "cold", "recomputed_steps": 0},
        {**resume, "generation": 1, "step": 9, "kind": "resumed", "recomputed_steps": 0},
        {**resume, "generation": 1, "step": 5, "kind": "resumed", "resume_from": "best", "given_up_steps": 7},
        begin,
        {**resume, "generation": 2, "step": 12, "kind": "resumed", "recomputed_steps": 1},
    )
    assert [(notice["kind"], notice["step"], notice["text"]) for notice in notices] == [
        ("start", 0, "training starts on 2 nodes, 4 ranks"),
        ("start", 9, "training continues after step 9 on 2 nodes, 4 ranks"),
        (
            "start",
            5,
            f"training continues after step 5 on 2 nodes, 4 ranks{WENT_BACK}",
        ),
        ("recovery", 12, "training continues after step 12 on 2 nodes, 4 ranks; 1 step to compute again"),
    ]


@pytest.mark.parametrize(
    ("outcome", "kind", "severity"),
    [
        ("done", "end", "note"),
        ("failed", "give-up", "bad"),
        ("signalled", "stop", "note"),
        ("left", "exclusion", "bad"),
    ],
)
def test_end_of_agent_is_notice_if_node_speaks_for_job(outcome: str, kind: str, severity: str) -> None:
    """Its kind follows from the outcome."""
    end = {"event": "agent-end", "outcome": outcome, "message": "so it ended.", "reason": None}
    (notice,) = make_notices({**end, "speaks_for_job": True})
    assert (notice["kind"], notice["severity"], notice["text"]) == (kind, severity, "so it ended")
    assert make_notices({**end, "speaks_for_job": False}) == []


@pytest.mark.parametrize(
    ("reason", "node"), [(GaveUp("n1", RestartsExhausted(FAILURE)), "n1"), (JobFinished(), None)]
)
def test_end_of_job_has_root_cause_of_give_up(reason: object, node: str | None) -> None:
    """A filter need not know where a reason has its failure."""
    end = {"event": "agent-end", "outcome": "failed", "message": "", "reason": to_json(reason)}
    (notice,) = make_notices({**end, "speaks_for_job": True})
    assert (notice["root_cause"] or {}).get("node") == node


def test_alert_is_made_once_in_generation() -> None:
    """A bad event, or one that a mechanism lists; neither other notes, nor what the job's end says too."""
    failed = {"event": "commit-failed", "generation": 1, "step": 4, "error": "no space"}
    notices = make_notices(
        failed,
        {**failed, "step": 5},
        {"event": "preemption-notice", "source": "aws", "reason": "spot", "deadline": None},
        {"event": "archived", "step": 4, "number": 1, "bytes": 9, "seconds": 1.0},
        {"event": "drain", "cause": "SIGTERM", "others_continue": False},
        {"event": "replicas-differ", "generation": 1, "step": 4, "nodes": [["n0"], ["n1"]]},
        {"event": "hang", "generation": 1, "step": 4, "seconds": 9, "waits_for_other_node": True},
        {"event": "generation-start", "generation": 2},
        {**failed, "generation": 2},
    )
    assert [(notice["severity"], notice["event"]) for notice in notices] == [
        ("bad", "commit-failed"),
        ("note", "preemption-notice"),
        ("bad", "commit-failed"),
    ]
    assert notices[0]["text"] == "the checkpoint could not be written: no space"


def test_failures_of_an_archive_that_differ_by_step_and_id_are_one_alert() -> None:
    """A full disk fails each try, of another attempt; a refusal of another kind is another problem."""
    text = "file:///mnt: cannot write parts/g000001-s{0}-{0}/00000: No space left on device; free space."
    failed = {"event": "archive-failed", "generation": 1}
    notices = make_notices(
        {**failed, "error": text.format(200), "error_kind": "quota"},
        {"event": "archive-recovered", "seconds": 4.0},
        {**failed, "error": text.format(400), "error_kind": "quota"},
        {**failed, "error": "access denied", "error_kind": "forbidden"},
        {"event": "generation-start", "generation": 2},
        {**failed, "error": text.format(600), "error_kind": "quota", "generation": 2},
    )
    assert [(notice["event"], notice["facts"].get("error_kind")) for notice in notices] == [
        ("archive-failed", "quota"),
        ("archive-recovered", None),
        ("archive-failed", "forbidden"),
        ("archive-failed", "quota"),
    ]


def test_secrets_of_texts_are_masked() -> None:
    """A failure may quote the script's arguments."""
    value = {"facts": ["train.py --api-key hunter2 --lr 0.1 token=hunter2 KeyError: 'x'", 5, None]}
    assert mask(value) == {"facts": ["train.py --api-key *** --lr 0.1 token=*** KeyError: 'x'", 5, None]}
    failure = Failure(EXIT, "n1", 1, WorkerEnd(2), message="usage: --token hunter2")
    assert "hunter2" not in str(make_notices(verdict(root_causes=to_json((failure,)))))
