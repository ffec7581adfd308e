"""Test the exported metrics against Prometheus' parser, the dashboard and the documents."""

from __future__ import annotations

import importlib.util
import json
import re
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elastic_resume import setting_values
from elastic_resume.errors import ConfigError
from elastic_resume.mechanisms.registry import MECHANISMS
from elastic_resume.rendezvous.net.status_server import RendezvousStatus
from elastic_resume.report import metrics
from elastic_resume.report.agent_status import AgentStatus
from elastic_resume.report.generations import INCIDENT_KINDS
from tests.support.paths import ROOT
from tests.unit.commands.test_job_status import make_document, make_leader_status, make_members, make_status

DASHBOARD = ROOT / "deploy" / "grafana" / "elastic-resume.json"


def scrape(status: AgentStatus) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return an agent's metrics as Prometheus parses them: name and label values to value."""
    return samples(generate_latest(metrics.make_registry(lambda: status)).decode())


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Parse a scrape."""
    return {
        (item.name, tuple(item.labels.values())): item.value
        for family in text_string_to_metric_families(text)
        for item in family.samples
    }


def test_scrape_of_leader_has_metrics_of_job_and_own_node() -> None:
    """Each number of the status has its metric."""
    found = scrape(make_leader_status(problem="disk full"))
    for name, labels, value in (
        ("step", (), 100),
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
        ("snapshot_step", ("n0",), 99),
        ("node_problem", ("n0",), 1),
        ("commits_total", ("n0",), 0),
    ):
        assert found["elastic_resume_" + name, labels] == pytest.approx(value), name
    assert ("elastic_resume_checkpoint_step", ("n0",)) not in found, "there is none"


def test_number_of_series_is_bounded_by_kinds() -> None:
    """Another node, incident or step adds none."""
    status = make_leader_status(1000)
    assert len(scrape(status)) == len(scrape(make_leader_status(2))) < 100
    made_up = replace(status, incidents=replace(status.incidents, by_kind=(("somebody made this up", 5),)))
    kinds = {labels for name, labels in scrape(made_up) if name == "elastic_resume_incidents_total"}
    assert kinds == {(kind,) for kind in INCIDENT_KINDS}


def test_agent_without_sample_exports_nothing_of_its_node() -> None:
    """Zeros would count all commits again."""
    found = scrape(replace(make_leader_status(), node_status=None))
    assert ("elastic_resume_is_leader", ()) in found
    assert not [name for name, labels in found if labels == ("n0",)]


def test_follower_exports_no_metrics_of_the_job() -> None:
    """Sums over all agents would count them twice."""
    names = {name for name, _ in scrape(make_status(RendezvousStatus(make_members(1)[0])))}
    assert "elastic_resume_node_step" in names
    assert not {f"elastic_resume_{name}" for name in (*metrics.JOB_GAUGES, "incidents_total")} & names


def test_dashboard_and_document_name_only_exported_metrics() -> None:
    """Panels, annotations and docs/reference/metrics.md agree with a scrape."""
    dashboard = json.loads(DASHBOARD.read_text())
    asked = " ".join(
        target["expr"] for panel in dashboard["panels"] for target in panel["targets"]
    ) + " ".join(str(item.get("expr")) for item in dashboard["annotations"]["list"])
    status = make_leader_status(checkpoint_step=1, checkpoint_age_s=2.0)
    gauges = {m.gauge.name for m in MECHANISMS if m.gauge}
    exposed = {name for name, _ in scrape(status)} | {metrics.PREFIX + name for name in gauges}
    names = set(re.findall(r"elastic_resume_\w+", asked))
    assert len(names) > 15
    assert names <= exposed
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text().partition("| metric")[2]
    listed = {
        name for row in page.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row)
    }
    plain = {re.sub(r"_(bucket|count|sum)$", "", name).removeprefix("elastic_resume_") for name in exposed}
    assert listed - {"status"} == plain


def test_status_document_has_the_documented_members() -> None:
    """docs/guides/monitoring.md lists exactly these."""
    page = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    table = page.partition("| member of")[2].partition("## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert {name for cell in rows for name in re.findall(r"`(\w+)`", cell)} == make_document().keys()


def test_scrape_configuration_matches_its_flag() -> None:
    """The file is YAML, and its port is that of the flag."""
    text = (DASHBOARD.parent / "prometheus.yml").read_text()
    (job,) = yaml.safe_load(text)["scrape_configs"]
    (flag,) = re.findall(r"--metrics \S+:(\d+)", text)
    assert job["static_configs"][0]["targets"][0].endswith(f":{flag}")


def test_metrics_flag_invalid_or_without_prometheus_client_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address is loopback unless one is given."""
    assert setting_values.parse_listen_address("--metrics", "9400") == ("127.0.0.1", 9400)
    assert setting_values.parse_listen_address("--metrics", "[::1]:0") == ("::1", 0)
    assert setting_values.parse_listen_address("--metrics", "0.0.0.0:80") == ("0.0.0.0", 80)  # noqa: S104
    for text in ("x", "localhost:80", "1.2.3:80", "70000", ":", "-1", "80:80:80:80:1", "train.py"):
        with pytest.raises(ConfigError, match=r"--metrics is .*write PORT \(of 127\.0\.0\.1\)"):
            setting_values.parse_listen_address("--metrics", text)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    metrics.check_installed(None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[metrics\]' in the clone"):
        metrics.check_installed(("127.0.0.1", 9400))


def test_scrape_over_http_is_read_only_and_empty_without_status(caplog: pytest.LogCaptureFixture) -> None:
    """Before an agent has its status, and after it ended, nothing is exported."""
    statuses: list[AgentStatus] = []

    def status() -> AgentStatus:
        if not statuses:
            raise ConnectionRefusedError
        return statuses[0]

    caplog.set_level("DEBUG", "elastic_resume")
    metrics.serve_metrics(("127.0.0.1", 0), status)
    address = caplog.messages[0].removeprefix("metrics at ")
    with urllib.request.urlopen(address, timeout=20) as answer:  # noqa: S310 - of this process
        assert answer.read() == b""
    statuses.append(make_leader_status())
    with urllib.request.urlopen(address, timeout=20) as answer:  # noqa: S310
        assert samples(answer.read().decode())["elastic_resume_step", ()] == 100
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(address, data=b"x", timeout=20)  # noqa: S310
    metrics.serve_metrics(("127.0.0.1", int(address.split(":")[2].split("/")[0])), status)
    assert caplog.messages[1].startswith("no metrics at 127.0.0.1 port ")
    assert caplog.messages[1].endswith("Address already in use. Training continues.")
