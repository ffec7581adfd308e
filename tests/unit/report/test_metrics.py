"""What is scraped is what Prometheus reads, under names that stay, and what the dashboard asks for."""

from __future__ import annotations

import importlib.util
import json
import re
import urllib.error
import urllib.request
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.policy.incidents import INCIDENT_KINDS
from elastic_resume.report import metrics
from tests.support.paths import ROOT
from tests.unit.agent.test_status import said

DASHBOARD = ROOT / "deploy" / "grafana" / "elastic-resume.json"


def scrape(document: dict[str, Any]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Read a document's metrics as Prometheus would: name and values of labels -> value."""
    return samples(generate_latest(metrics.make_registry(lambda: document)).decode())


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Read a scrape."""
    return {
        (one.name, tuple(one.labels.values())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_scrape_tells_of_job_and_nodes() -> None:
    """Each figure of the document, by name."""
    found = scrape(said(trouble=1))
    for name, labels, value in (
        ("step", (), 101),
        ("steps_per_second", (), 2.5),
        ("generation", (), 3),
        ("world_nodes", (), 2),
        ("world_ranks", (), 2),
        ("spares", (), 1),
        ("is_leader", (), 1),
        ("incidents_total", ("signal",), 2),
        ("incidents_total", ("oom",), 0),
        ("recomputed_steps_total", (), 3),
        ("recovery_seconds_bucket", ("0.25",), 0),
        ("recovery_seconds_bucket", ("0.5",), 2),
        ("recovery_seconds_bucket", ("+Inf",), 2),
        ("recovery_seconds_count", (), 2),
        ("recovery_seconds_sum", (), 0.8),
        ("node_step", ("n0",), 100),
        ("snapshot_step", ("n1",), 99),
        ("node_problem", ("n0",), 0),
        ("node_problem", ("n1",), 1),
        ("commits_total", ("n0",), 0),
    ):
        assert found["elastic_resume_" + name, labels] == pytest.approx(value), name
    assert ("elastic_resume_checkpoint_step", ("n0",)) not in found, "there is none"


def test_there_are_as_many_series_as_nodes_and_kinds() -> None:
    """Another incident or step makes no new one."""
    few, many = (len(scrape(said(count))) for count in (20, 30))
    assert (many - few) % 10 == 0
    assert few < 400
    document = said()
    document["totals"]["incidents"]["of a kind that somebody made up"] = 5
    kinds = {labels for name, labels in scrape(document) if name == "elastic_resume_incidents_total"}
    assert kinds == {(kind,) for kind in INCIDENT_KINDS}


def test_a_node_that_was_not_heard_of_yet_has_no_samples() -> None:
    """A new leader's zeros would count all that it ever committed once more."""
    document = said()
    document["nodes"][1].update(status_age_s=None)
    found = scrape(document)
    assert ("elastic_resume_commits_total", ("n0",)) in found
    assert not [name for name, labels in found if labels == ("n1",)]


def test_who_does_not_lead_tells_nothing_of_the_whole() -> None:
    """Or sums over all agents would count it twice."""
    document = {**said(), "leads": False}
    names = {name for name, _ in scrape(document)}
    assert "elastic_resume_node_step" in names
    assert not {f"elastic_resume_{name}" for name in (*metrics.JOB_GAUGES, "incidents_total")} & names


def test_the_dashboard_asks_for_nothing_that_is_not_there() -> None:
    """Its JSON is whole, and each metric that it names is exposed; so is what the docs list."""
    dashboard = json.loads(DASHBOARD.read_text())
    asked = " ".join(
        target["expr"] for panel in dashboard["panels"] for target in panel["targets"]
    ) + " ".join(str(one.get("expr")) for one in dashboard["annotations"]["list"])
    document = said()
    document["nodes"][0].update(checkpoint_step=1, checkpoint_age_s=2.0)
    exposed = {name for name, _ in scrape(document)}
    names = set(re.findall(r"elastic_resume_\w+", asked))
    assert len(names) > 15
    assert names <= exposed
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    page = (ROOT / "docs" / "monitoring.md").read_text().partition("| metric")[2]
    listed = {
        name for row in page.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row)
    }
    plain = {re.sub(r"_(bucket|count|sum)$", "", name).removeprefix("elastic_resume_") for name in exposed}
    assert listed - {"status"} == plain


def test_the_scrape_is_of_the_flags_that_it_speaks_of() -> None:
    """Prometheus would refuse a file that is not YAML."""
    text = (DASHBOARD.parent / "prometheus.yml").read_text()
    (job,) = yaml.safe_load(text)["scrape_configs"]
    (flag,) = re.findall(r"--metrics \S+:(\d+)", text)
    assert job["static_configs"][0]["targets"][0].endswith(f":{flag}")


def test_metrics_flag_invalid_or_without_prometheus_client_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address is loopback unless one is given."""
    assert metrics.parse_listen_address(None, {}) is None
    assert metrics.parse_listen_address("9400", {}) == ("127.0.0.1", 9400)
    assert metrics.parse_listen_address(None, {constants.ENV_METRICS: "[::1]:0"}) == ("::1", 0)
    assert metrics.parse_listen_address("0.0.0.0:80", {}) == ("0.0.0.0", 80)  # noqa: S104
    for text in ("x", "localhost:80", "1.2.3:80", "70000", ":", "-1", "80:80:80:80:1", "train.py"):
        with pytest.raises(ConfigError, match=r"--metrics is .*write PORT \(of 127\.0\.0\.1\)"):
            metrics.parse_listen_address(text, {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert metrics.parse_listen_address(None, {}) is None
    with pytest.raises(ConfigError, match=r"pip install 'elastic-resume\[metrics\]'"):
        metrics.parse_listen_address("9400", {})


def test_scrape_over_http_is_read_only_and_empty_without_status() -> None:
    """Before the agent has its place, and after it has left it, there is nothing to export."""
    documents: list[dict[str, Any]] = []

    def status() -> dict[str, Any]:
        if not documents:
            raise ConnectionRefusedError
        return documents[0]

    said_lines: list[str] = []
    metrics.serve_metrics(("127.0.0.1", 0), status, said_lines.append)
    address = said_lines[0].removeprefix("metrics at ")
    with urllib.request.urlopen(address, timeout=20) as answer:  # noqa: S310 - of this process
        assert answer.read() == b""
    documents.append(said())
    with urllib.request.urlopen(address, timeout=20) as answer:  # noqa: S310
        assert samples(answer.read().decode())["elastic_resume_step", ()] == 101
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(address, data=b"x", timeout=20)  # noqa: S310
    metrics.serve_metrics(("127.0.0.1", int(address.split(":")[2].split("/")[0])), status, said_lines.append)
    assert said_lines[1].startswith("no metrics at 127.0.0.1 port ")
    assert said_lines[1].endswith("Address already in use. Training continues.")
