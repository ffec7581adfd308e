"""Parse the settings of uploads, and describe uploads in events, logs, reports, `status` and metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic_resume.errors import ConfigError
from elastic_resume.events import Event, get_count, get_seconds
from elastic_resume.mechanisms.mechanism import AlertKind, Gauge, ReportLine, StatusMember
from elastic_resume.policy.checkpoint_interval import IntervalSetting
from elastic_resume.units import format_count, parse_duration

MIN_EVERY_S = 1.0


def parse_every(setting: str, value: object) -> IntervalSetting:
    """Parse the interval between two archived checkpoints: steps, or a time with its unit."""
    text = str(value).strip()
    if re.fullmatch(r"\d{1,12}", text) and int(text) > 0:
        return IntervalSetting(steps=int(text))
    if re.fullmatch(r"[0-9.eE+-]+(ms|[smhd])", text):
        return IntervalSetting(seconds=parse_duration(setting, text, min_s=MIN_EVERY_S))
    raise ConfigError(f"{setting} is {text[:100]!r}: write a number of steps (1000) or a time (30m, 2h).")


def parse_keep(setting: str, value: object) -> int | None:
    """Parse the number of archived checkpoints to keep; None: all."""
    text = str(value).strip()
    if text == "all":
        return None
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < 1:
        raise ConfigError(f"{setting} is {text[:100]!r}: write a whole number, 1 or more, or all.")
    return int(text)


@dataclass(frozen=True, slots=True)
class ArchiveStatus:
    """What a node knows of the job's archive, and what it does there."""

    archive: str
    step: int | None = None
    """Of the newest archived checkpoint of this start; None before the first."""
    age_s: float = 0.0
    """Seconds since that one was archived."""
    uploading_step: int | None = None
    put_parts: int = 0
    parts: int = 0
    problem: str = ""
    failing_s: float | None = None
    """Seconds since requests began to fail; None unless they do."""
    retry_s: float | None = None
    """Seconds until the next try."""


def describe_status(status: ArchiveStatus) -> str:
    """Say what is archived and how old it is, what is being uploaded, and what fails."""
    done = "nothing archived yet"
    if status.step is not None:
        done = f"step {status.step} archived {_format_age(status.age_s)} ago"
    if status.uploading_step is not None:
        done += (
            f", step {status.uploading_step} is being uploaded ({status.put_parts} of {status.parts} parts)"
        )
    if status.problem:
        since = "" if status.failing_s is None else f"failing for {_format_age(status.failing_s)}: "
        done += f"; {since}{status.problem.rstrip('.')}"
    if status.retry_s is not None:
        done += f"; next try in {_format_age(status.retry_s)}"
    return f"archive {status.archive}: {done}"


def _format_age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _describe_failure(event: Event) -> str:
    return f"an upload to the archive failed: {event.get('error') or 'no reason recorded'}"


def _describe_damage(event: Event) -> str:
    error = event.get("error") or "it is damaged"
    return f"step {event.get('step')} is not archived from this node's disk: {error}"


def _describe_recovery(event: Event) -> str:
    return f"uploads to the archive work again, after {_format_age(get_seconds(event, 'seconds') or 0.0)}"


def _describe_refusal(event: Event) -> str:
    return str(event.get("error") or "this job archives no more")


def describe_uploads(uploads: Sequence[Event], end_t: float) -> str:
    """Say what this job has archived, and how old the newest was at the run's end."""
    newest = max(uploads, key=lambda event: (_count(event, "checkpoint_generation"), _count(event, "step")))
    age = _format_age(max(0.0, end_t - (get_seconds(newest) or end_t)))
    count = format_count(len(uploads), "checkpoint")
    step = _count(newest, "step")
    return f"archive {newest.get('archive')}: {count} put, newest: step {step}, {age} before the end"


def _count(event: Event, name: str) -> int:
    return get_count(event, name) or 0


def _sample(member: dict[str, Any]) -> float:
    return float("nan") if member["step"] is None else float(member["age_s"])


ALERTS = (
    AlertKind(
        "archive-failed",
        _describe_failure,
        is_bad=True,
        ended_by="archive-recovered",
        same_by=("error_kind",),
    ),
    AlertKind("archive-damaged", _describe_damage, is_bad=True),
    AlertKind("archive-recovered", _describe_recovery),
    AlertKind("archive-refused", _describe_refusal, is_bad=True),
)
REPORT_LINE = ReportLine("archived", describe_uploads)
STATUS = StatusMember("archive", ArchiveStatus, describe_status)
GAUGE = Gauge(
    "archive_age_seconds",
    "Seconds since this job archived a checkpoint; NaN before its first one, no sample without --archive.",
    _sample,
    label="archive",
)
