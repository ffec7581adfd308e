"""Describe what compute checks have found in logs, reports, `status` and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.events import Event, get_count
from elastic_resume.mechanisms.compute_check.judge import ComputeComparison, Outcome
from elastic_resume.mechanisms.mechanism import AlertKind, Gauge, StatusMember

CHECK_EVENT, DIFFERENCE_EVENT, OFF_EVENT = "compute-check", "gradients-differ", "compute-check-off"


@dataclass(frozen=True, slots=True)
class GradientDifference:
    """A rank whose gradients differ from the majority's, or ranks without a majority."""

    step: int
    rank: int | None = None
    node: str = ""
    gpu: str = ""
    """Its UUID; empty for a rank that trains on the CPU."""
    name: str = ""
    """The first output or parameter whose value or gradient differs."""
    agreed_step: int = 0
    """The newest check of this generation with equal ranks; 0 if there was none."""
    times: int = 1
    """How often this GPU, or local rank of this node, was named in the run."""
    has_other_inputs: bool = False
    """Its parameters or what it received differ, so it may compute rightly."""
    ranks: tuple[str, ...] = ()
    """Without a majority: the ranks, each with its node."""


@dataclass(frozen=True, slots=True)
class ComputeCheckStatus:
    """The newest check that this node's workers took part in."""

    step: int
    is_equal: bool
    """Whether all ranks had the same."""
    wrong: int = 0
    """How often a rank of this node was named since its agent started."""


def describe_difference(found: GradientDifference) -> str:
    """Say which rank computes wrongly, and since when."""
    agreed = found.agreed_step
    since = f"all ranks agreed at step {agreed}" if agreed else "no check of this generation agreed before"
    if found.rank is None:
        ranks = ", ".join(found.ranks)
        return (
            f"ranks compute different gradients from the same batch at step {found.step}, and there is no "
            f"majority: {ranks}; it is unknown which is wrong ({since})"
        )
    gpu = f" ({found.gpu})" if found.gpu else ""
    who = f"rank {found.rank} on {found.node}{gpu}"
    if found.has_other_inputs:
        return (
            f"{who} computes other gradients than the majority at step {found.step}, but from other "
            f"parameters or another batch: its replica or its network is wrong ({since})"
        )
    cause = "its machine computes wrongly, or the model computes something else on this rank"
    if agreed:  # it computed what the others do, so the rank alone is no reason
        cause = "its machine most likely computes wrongly"
    count = f", for the {_ORDINALS.get(found.times, f'{found.times}th')} time" if found.times > 1 else ""
    return (
        f"{who} computes other gradients than the majority at step {found.step}{count}, from the same "
        f"parameters and batch: {found.name} differs ({since}); {cause}, and what the job has learned "
        "since is in doubt: --resume-from goes back to an earlier checkpoint"
    )


_ORDINALS = {2: "second", 3: "third"}


def describe_off(comparison: ComputeComparison, agreed_step: int) -> str:
    """Say why a comparison shows that none is possible."""
    agreed = f", though all ranks agreed at step {agreed_step}" if agreed_step else ""
    if comparison.outcome is Outcome.ALL_DIFFERENT:
        return f"each rank computes another result from rank 0's batch{agreed}: the model depends on its rank"
    ranks = ", ".join(map(str, comparison.ranks))
    return (
        f"the same batch gives other gradients each time (rank {ranks}){agreed}: the model is not "
        "deterministic, or a machine is broken. CUBLAS_WORKSPACE_CONFIG=:4096:8 lets torch choose "
        "deterministic algorithms"
    )


def describe_status(status: ComputeCheckStatus) -> str:
    """Say what the newest check has shown, and how often this node was named."""
    text = f"compute check at step {status.step}: {'all ranks equal' if status.is_equal else 'ranks differ'}"
    return f"{text}; wrong results on this node: {status.wrong}" if status.wrong else text


def read_difference(event: Event) -> GradientDifference:
    """Return the difference of an event."""
    return GradientDifference(
        get_count(event, "step") or 0,
        get_count(event, "rank"),
        str(event.get("node") or ""),
        str(event.get("gpu") or ""),
        str(event.get("name") or "a gradient"),
        get_count(event, "agreed_step") or 0,
        get_count(event, "times") or 1,
        has_other_inputs=event.get("has_other_inputs") is True,
        ranks=tuple(map(str, event.get("ranks") or ())),
    )


def _describe_event(event: Event) -> str:
    return describe_difference(read_difference(event))


def _describe_off_event(event: Event) -> str:
    return f"compute checks are off: {event.get('reason') or 'no reason recorded'}"


ALERTS = (
    AlertKind(DIFFERENCE_EVENT, _describe_event, is_bad=True, is_worst=True),
    AlertKind(OFF_EVENT, _describe_off_event),
)
STATUS = StatusMember("compute_check", ComputeCheckStatus, describe_status)
GAUGE = Gauge(
    "compute_check_wrong",
    "How often a rank of the node computed wrong gradients since its agent started (--check-compute-every).",
    lambda member: float(member["wrong"]),
)
