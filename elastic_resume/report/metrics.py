"""What Prometheus scrapes, made of the document that agents give (`agent.document`).

Names follow https://prometheus.io/docs/practices/naming: base units, ``_total`` for what only grows. Labels
are a node's name, a kind of incident, a part of the time: as many series as nodes and kinds. An agent that
does not lead tells of its own node; of the job its leader alone tells, so that sums over agents are right.

prometheus_client is imported when it is needed: the rest of the package does without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_resume.policy.tally import KINDS

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX = "elastic_resume_"
# name -> what it is, and where a node's part of the document has it.
NODE_GAUGES = {
    "node_step": ("The newest step that the node's workers have finished.", "step"),
    "node_steps_per_second": ("Steps a second, over the last ten seconds.", "steps_per_s"),
    "node_own_seconds": ("What a step takes the slowest of the node's ranks, waiting for no other.", "own_s"),
    "node_heard_age_seconds": ("Seconds since the node told of itself.", "heard_s"),
    "snapshot_step": ("Step of the newest snapshot in the node's memory.", "snapshot_step"),
    "snapshot_age_seconds": ("Age of the newest snapshot in the node's memory.", "snapshot_age_s"),
    "checkpoint_step": ("Step of the newest checkpoint on the node's disk.", "checkpoint_step"),
    "checkpoint_age_seconds": ("Age of the newest checkpoint on the node's disk.", "checkpoint_age_s"),
}
NODE_COUNTERS = {
    "commits": ("Checkpoints that the node has written.", "commits"),
    "commit_seconds": ("Seconds that the node's checkpoints took to be written.", "commit_s"),
    "commit_bytes": ("Bytes of checkpoints that the node has written.", "commit_bytes"),
    "commit_failures": ("Checkpoints that the node's disk refused.", "commit_failures"),
}
JOB_GAUGES = {
    "generation": "Generation of the newest world.",
    "step": "The newest step that any node has finished.",
    "steps_per_second": "Steps a second, over the last ten seconds.",
    "world_nodes": "Nodes in the world that runs; 0 while none does.",
    "world_ranks": "Ranks in the world that runs.",
    "spares": "Nodes that stand by.",
    "missing_nodes": "Members of the last world that are not here, while no world runs.",
}


def exposition(said: Mapping[str, Any], parts: Mapping[str, float] | None = None) -> tuple[bytes, str]:
    """Give the text and its content type. ``parts``: seconds of the job's time by what they went into.

    Raises:
        ImportError: prometheus_client is not installed.
        KeyError, TypeError: it is no such document.

    """
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - an extra
    from prometheus_client.exposition import CONTENT_TYPE_LATEST  # noqa: PLC0415
    from prometheus_client.registry import Collector  # noqa: PLC0415

    found = list(metrics(said, parts))

    class Document(Collector):
        def collect(self) -> Iterator[Metric]:
            return iter(found)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Document())
    return generate_latest(registry), CONTENT_TYPE_LATEST


def metrics(said: Mapping[str, Any], parts: Mapping[str, float] | None) -> Iterator[Metric]:
    """Give each family of samples."""
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

    leads = GaugeMetricFamily(
        f"{PREFIX}leads", "Whether this agent leads the job: it alone tells of all of it."
    )
    leads.add_metric([], float(said["leads"]))
    yield leads
    yield from _of_nodes(said["nodes"])
    if said["leads"]:
        yield from _of_job(said)
        yield from _of_incidents(said["sums"])
    if said["leads"] and parts:
        spent = GaugeMetricFamily(
            f"{PREFIX}time_seconds",
            "What the job's time went into so far, as the report tells it.",
            labels=["part"],
        )
        for part, seconds in parts.items():
            spent.add_metric([part], seconds)
        yield spent


def _of_nodes(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

    # Of the others a new leader does not know yet: a counter that falls to 0 would count all of it anew.
    nodes = [one for one in nodes if one["heard_s"] is not None]
    for name, (text, key) in NODE_GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["node"])
        for one in nodes:
            if one[key] is not None:
                gauge.add_metric([one["node"]], one[key])
        yield gauge
    trouble = GaugeMetricFamily(
        f"{PREFIX}node_trouble", "1 while something is wrong with the node's disk or memory.", labels=["node"]
    )
    for one in nodes:
        trouble.add_metric([one["node"]], float(bool(one["trouble"])))
    yield trouble
    for name, (text, key) in NODE_COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=["node"])
        for one in nodes:
            counter.add_metric([one["node"]], one[key])
        yield counter


def _of_job(said: Mapping[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

    world = said["world"]
    told = {
        "generation": said["generation"],
        "step": said["step"],
        "steps_per_second": said["steps_per_s"],
        "world_nodes": len(world["nodes"]) if world else 0,
        "world_ranks": world["ranks"] if world else 0,
        "spares": len(said["spares"]),
        "missing_nodes": len(said["missing"]),
    }
    for name, text in JOB_GAUGES.items():
        yield GaugeMetricFamily(PREFIX + name, text, value=told[name])


def _of_incidents(sums: Mapping[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily  # noqa: PLC0415

    incidents = CounterMetricFamily(
        f"{PREFIX}incidents", "Worlds that a failure ended, by the kind of the first.", labels=["kind"]
    )
    for kind in KINDS:  # each from the beginning: a rate needs a 0 to rise from
        incidents.add_metric([kind], sums["incidents"].get(kind, 0))
    yield incidents
    yield CounterMetricFamily(f"{PREFIX}lost_steps", "Steps that were run again.", value=sums["lost_steps"])
    total, buckets = 0, []
    for bound, count in zip([*map(str, sums["recovery_bounds_s"]), "+Inf"], sums["recoveries"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    yield HistogramMetricFamily(
        f"{PREFIX}recovery_seconds",
        "From the first sign of a failure to the next world's first step.",
        buckets=buckets,
        sum_value=sums["recovery_s"],
    )
