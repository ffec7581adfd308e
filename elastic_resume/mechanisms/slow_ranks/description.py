"""Describe a slow rank in logs, reports, `status` and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic_resume.events import Event, get_count, get_seconds
from elastic_resume.mechanisms.mechanism import AlertKind, Gauge, StatusMember


@dataclass(frozen=True, slots=True)
class SlowRankStatus:
    """A rank for which all others wait, and the medians of its and of their own times."""

    rank: int
    own_s: float
    others_s: float
    gpu: str = ""
    """Its UUID; empty for a rank that trains on the CPU."""
    load: str = ""
    """Clock, temperature and slowdowns of the GPU; empty without NVML."""


def describe_slow_rank(status: SlowRankStatus) -> str:
    """Say how slow a rank is, and what its GPU does."""
    on_gpu = (f" on {status.gpu}" if status.gpu else "") + (f" ({status.load})" if status.load else "")
    return (
        f"rank {status.rank}{on_gpu} is slow, and all others wait for it: it takes {status.own_s:.3g} s from "
        f"a step's end to the next gradient, and they take {status.others_s:.3g} s"
    )


def _describe_begin(event: Event) -> str:
    own_s, others_s = get_seconds(event, "own_s") or 0.0, get_seconds(event, "others_s") or 0.0
    gpu, load = (str(event.get(name) or "") for name in ("gpu", "load"))
    return describe_slow_rank(SlowRankStatus(get_count(event, "rank") or 0, own_s, others_s, gpu, load))


def _describe_end(event: Event) -> str:
    return f"rank {event.get('rank')} was no longer slow at step {event.get('step')}"


def _sample(member: dict[str, Any]) -> float:
    return float(member["own_s"] / member["others_s"])


ALERTS = (
    AlertKind("slow-rank", _describe_begin, is_bad=True, ended_by="slow-rank-ended"),
    AlertKind("slow-rank-ended", _describe_end),
)
STATUS = StatusMember("slow_rank", SlowRankStatus, describe_slow_rank)
GAUGE = Gauge(
    "slow_rank",
    "How many times as long a rank of the node takes as the others; no sample while none is slow.",
    _sample,
    label="rank",
)
