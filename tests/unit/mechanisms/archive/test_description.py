"""Test the settings of uploads, and what people read of them in `status`, metrics and report."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from elastic_resume.commands.job_status import build_document, format_screen
from elastic_resume.errors import ConfigError
from elastic_resume.mechanisms.archive.description import (
    STATUS,
    ArchiveStatus,
    describe_status,
    parse_every,
    parse_keep,
)
from elastic_resume.mechanisms.mechanism import encode_body
from elastic_resume.policy.checkpoint_interval import IntervalSetting
from elastic_resume.report import summary
from tests.support.report_runs import Job
from tests.unit.commands.test_job_status import make_leader_status, make_members
from tests.unit.report.test_metrics import scrape

ARCHIVED = ArchiveStatus("s3://bucket/job", 40, 90.0, 60, 2, 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30m", IntervalSetting(seconds=1800.0)),
        ("1000", IntervalSetting(steps=1000)),
        ("auto", None),
        ("0", None),
        ("0s", None),
        ("", None),
        ("-5", None),
        ("1.5", None),
        ("30min", None),
        ("30 min", None),
    ],
)
def test_interval_is_a_time_or_a_number_of_steps(text: str, expected: IntervalSetting | None) -> None:
    """A bare number is steps, as for --save-every."""
    if expected is not None:
        assert parse_every("--archive-every", text) == expected
        return
    sentence = r"--archive-every is .*: write (a number of steps \(1000\) or a time \(30m, 2h\)|a time of 1s)"
    with pytest.raises(ConfigError, match=sentence):
        parse_every("--archive-every", text)


@pytest.mark.parametrize(("text", "expected"), [("all", None), ("1", 1), ("12", 12)])
def test_number_of_kept_checkpoints_is_parsed(text: str, expected: int | None) -> None:
    """One suffices: an entry is deleted only after a newer one was committed."""
    assert parse_keep("--archive-keep", text) == expected


@pytest.mark.parametrize("text", ["0", "-1", "none", "", "1.0"])
def test_other_numbers_of_kept_checkpoints_are_refused(text: str) -> None:
    """The message names the setting and the forms."""
    with pytest.raises(ConfigError, match=r"--archive-keep is .*1 or more, or all"):
        parse_keep("--archive-keep", text)


def test_status_and_metrics_have_newest_archived_step_and_its_age() -> None:
    """Another node has no archive, and no sample."""
    status = make_leader_status(2, mechanisms=((STATUS.name, encode_body(ARCHIVED)),))
    document = build_document("job", status, make_members(2), {"n0:1": status, "n1:1": make_leader_status(2)})
    assert [node["archive"] and node["archive"]["step"] for node in document["nodes"]] == [40, None]
    assert any("step 60 is being uploaded (2 of 5" in line for line in format_screen(document))
    assert scrape(status)["elastic_resume_archive_age_seconds", ("s3://bucket/job", "n0")] == 90.0
    first = make_leader_status(2, mechanisms=((STATUS.name, encode_body(replace(ARCHIVED, step=None))),))
    assert math.isnan(scrape(first)["elastic_resume_archive_age_seconds", ("s3://bucket/job", "n0")])


def test_problem_is_shown_beside_what_is_archived() -> None:
    """A person has to act, and to know how much is at stake."""
    fine = ArchiveStatus("s3://b/j", 20, 240.0)
    assert describe_status(fine) == "archive s3://b/j: step 20 archived 4 min ago"
    failing = replace(fine, problem="no way.", failing_s=180.0, retry_s=30.0)
    assert describe_status(failing) == (
        "archive s3://b/j: step 20 archived 4 min ago; failing for 3 min: no way; next try in 30 s"
    )
    refused = ArchiveStatus("s3://b/j", 20, 9000.0, problem="another job.")
    assert describe_status(refused) == "archive s3://b/j: step 20 archived 2.5 h ago; another job"
    assert "nothing archived yet" in describe_status(ArchiveStatus("s3://bucket/job"))


def test_report_says_what_is_archived_when_all_goes_well() -> None:
    """A milestone that is put late is not the newest."""
    job = Job().begun()
    fields = {"number": 1, "bytes": 1000, "seconds": 2.0, "archive": "s3://bucket/llm/job"}
    job.add(111, "archived", "n1", step=40, checkpoint_generation=1, **fields)
    job.add(112, "archived", "n1", step=30, checkpoint_generation=1, **fields)
    job.add(124, "step", "n1", rank=0, step=50)
    text = summary.format_text(summary.build_run_report(job.events))
    line = "archive s3://bucket/llm/job: 2 checkpoints put, newest: step 40, 13 s before the end"
    assert line in text.splitlines()


def test_failures_of_one_kind_are_one_alert() -> None:
    """Their texts have steps and requests in them."""
    job = Job().begun()
    for at, error, kind in (
        (111, "step 5: slow", "timeout"),
        (112, "step 6: slow", "timeout"),
        (113, "no", "denied"),
    ):
        job.add(at, "archive-failed", "n1", error=error, error_kind=kind)
    alerts = summary.build_run_report(job.events).alerts
    assert [alert.count for alert in alerts if alert.kind == "archive-failed"] == [2, 1]


def test_failure_is_a_hint_until_uploads_work_again() -> None:
    """It stays in the list of what happened; an archived checkpoint is no problem, and so not in it."""
    job = Job().begun()
    job.add(111, "archive-failed", "n1", error="no permission")
    failing = summary.build_run_report(job.events)
    job.add(112, "archive-recovered", "n1", seconds=90.0)
    job.add(113, "archived", "n1", step=40, checkpoint_generation=1, number=1, bytes=1000, seconds=2.0)
    job.add(114, "archive-damaged", "n1", step=5, error="/ckpt/g1-s5: a block is wrong.")
    ended = summary.build_run_report(job.events)
    assert any("no permission" in hint for hint in failing.verdict.hints)
    assert not any("no permission" in hint for hint in ended.verdict.hints)
    assert [alert.text for alert in ended.alerts] == [
        "an upload to the archive failed: no permission",
        "uploads to the archive work again, after 2 min",
        "step 5 is not archived from this node's disk: /ckpt/g1-s5: a block is wrong.",
    ]
