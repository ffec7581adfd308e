"""Export an agent's status as metrics for Prometheus, with prometheus_client's server.

Names follow https://prometheus.io/docs/practices/naming: base units, ``_total`` for counters. Labels are node
names and kinds of incidents, so the number of series is bounded. Each agent exports its own node, and only
the leader what it knows of the whole job, so sums over agents are right. The server is read-only, and no
metric holds a secret of the job.

prometheus_client is an optional dependency: it is imported only if metrics are requested.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.mechanisms.registry import MECHANISMS
from elastic_resume.rendezvous.net.protocol import ProtocolError
from elastic_resume.report.agent_status import AgentStatus, KnownIncidents, NodeStatus, describe_node
from elastic_resume.report.generations import INCIDENT_KINDS, RECOVERY_BUCKETS_S
from elastic_resume.units import format_address

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

logger = logging.getLogger(__name__)

PREFIX = "elastic_resume_"
# The description of each metric, and the member of `describe_node`.
NODE_GAUGES = {
    "node_step": ("The newest step that the node's workers have finished.", "step"),
    "node_steps_per_second": ("Steps per second, over the last ten seconds.", "steps_per_s"),
    "node_status_age_seconds": ("Seconds since the agent last looked at its node.", "status_age_s"),
    "snapshot_step": ("Step of the newest snapshot in the node's memory.", "snapshot_step"),
    "snapshot_age_seconds": ("Age of the newest snapshot in the node's memory.", "snapshot_age_s"),
    "checkpoint_step": ("Step of the newest checkpoint on the node's disk.", "checkpoint_step"),
    "checkpoint_age_seconds": ("Age of the newest checkpoint on the node's disk.", "checkpoint_age_s"),
}
NODE_COUNTERS = {
    "commits": ("Checkpoints that the node has written.", "commits"),
    "commit_seconds": ("Seconds that the node's commits took.", "commit_s"),
    "commit_bytes": ("Bytes of checkpoints that the node has written.", "commit_bytes"),
    "commit_failures": ("Commits that failed on the node.", "commit_failures"),
}
JOB_GAUGES = {
    "generation": "Generation of the newest world.",
    "step": "The newest step that the leader's node has finished.",
    "steps_per_second": "Steps per second of the leader's node, over the last ten seconds.",
    "world_nodes": "Nodes of the running world; 0 without one.",
    "world_ranks": "Ranks of the running world.",
    "spares": "Spare nodes.",
    "missing_nodes": "Absent members of the last world, while no world runs.",
}


def check_installed(listen_address: tuple[str, int] | None) -> None:
    """Raise ConfigError if metrics are wanted and prometheus_client is not installed."""
    if listen_address is not None and importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            "--metrics needs prometheus-client, which is not installed: "
            f"{constants.EXTRA_INSTALL.format('metrics')}."
        )


def serve_metrics(listen_address: tuple[str, int], get_status: Callable[[], AgentStatus]) -> None:
    """Serve metrics from daemon threads until this process ends.

    ``get_status`` returns the agent's status for each scrape. If the port is taken, training continues
    without.
    """
    from prometheus_client import start_http_server  # noqa: PLC0415 - an extra

    address, port = listen_address
    try:
        server, _ = start_http_server(port, address, make_registry(get_status))
    except OSError as error:
        reason = error.strerror or error
        logger.warning("no metrics at %s port %d: %s. Training continues.", address, port, reason)
        return
    logger.debug("metrics at http://%s/metrics", format_address(address, server.server_port))


def make_registry(get_status: Callable[[], AgentStatus]) -> CollectorRegistry:
    """Return a registry that collects the metrics of ``get_status()`` for each scrape."""
    from prometheus_client import CollectorRegistry  # noqa: PLC0415 - an extra
    from prometheus_client.registry import Collector  # noqa: PLC0415

    class Status(Collector):
        def collect(self) -> Iterator[Metric]:
            try:
                status = get_status()
            except (OSError, ValueError, ProtocolError):
                return  # the agent is starting or ending
            yield from collect_metrics(status)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Status())
    return registry


def collect_metrics(status: AgentStatus) -> Iterator[Metric]:
    """Yield each metric family of an agent's status."""
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

    is_leader = GaugeMetricFamily(
        f"{PREFIX}is_leader", "1 if this agent is the leader, which exports the metrics of the job."
    )
    is_leader.add_metric([], float(status.rendezvous.is_leader))
    yield is_leader
    if status.node_status:
        yield from _collect_node_metrics(status)
    if status.rendezvous.is_leader:
        yield from _collect_job_metrics(status)
        yield from _collect_incident_metrics(status.incidents)


def _collect_node_metrics(status: AgentStatus) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

    name_label, node = [status.rendezvous.incarnation.node], describe_node(status)
    for name, (text, key) in NODE_GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["node"])
        if node[key] is not None:
            gauge.add_metric(name_label, node[key])
        yield gauge
    problem = GaugeMetricFamily(
        f"{PREFIX}node_problem", "1 while the node's disk or memory has a problem.", labels=["node"]
    )
    problem.add_metric(name_label, float(bool(node["problem"])))
    yield problem
    for mechanism in MECHANISMS:
        if mechanism.gauge and mechanism.status:
            name, text, sample, label = mechanism.gauge
            labels = [label] if label else []
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["node", *labels])
            if member := node[mechanism.status.name]:
                gauge.add_metric([*name_label, *(str(member[key]) for key in labels)], sample(member))
            yield gauge
    for name, (text, key) in NODE_COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=["node"])
        counter.add_metric(name_label, node[key])
        yield counter


def _collect_job_metrics(status: AgentStatus) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

    rendezvous, node = status.rendezvous, status.node_status or NodeStatus()
    view = rendezvous.view
    is_running = view is not None and node.generation == view.generation
    values = {
        "generation": rendezvous.generation,
        "step": node.step,
        "steps_per_second": node.steps_per_s if is_running else 0.0,
        "world_nodes": len(view.members) if view else 0,
        "world_ranks": node.world_size if is_running else 0,
        "spares": len(rendezvous.others) if view else 0,
        "missing_nodes": len(rendezvous.missing),
    }
    for name, text in JOB_GAUGES.items():
        yield GaugeMetricFamily(PREFIX + name, text, value=values[name])


def _collect_incident_metrics(known: KnownIncidents) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily  # noqa: PLC0415

    incidents = CounterMetricFamily(
        f"{PREFIX}incidents",
        "Generations that ended by a failure, by kind of the root cause.",
        labels=["kind"],
    )
    by_kind = dict(known.by_kind)
    for kind in INCIDENT_KINDS:  # list all kinds from the start, because a rate needs an initial 0
        incidents.add_metric([kind], by_kind.get(kind, 0))
    yield incidents
    yield CounterMetricFamily(
        f"{PREFIX}recomputed_steps", "Steps that were run again.", value=known.recomputed_steps
    )
    total, buckets = 0, []
    for bound, count in zip([*map(str, RECOVERY_BUCKETS_S), "+Inf"], known.recovery_counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    yield HistogramMetricFamily(
        f"{PREFIX}recovery_seconds",
        "From the first sign of a failure to the next world's first step.",
        buckets=buckets,
        sum_value=known.recovery_s,
    )
