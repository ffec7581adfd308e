"""Status and metrics of a job of three real agents, with unauthenticated peers and a lost leader."""

from __future__ import annotations

import contextlib
import io
import json
import re
import secrets
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_resume import cli, constants
from elastic_resume.report import summary
from elastic_resume.report.loader import load_run
from elastic_resume.testing import Cluster
from elastic_resume.testing.fault_runner import FaultInjector
from elastic_resume.testing.faults import Fault
from tests.support.paths import SCRIPTS
from tests.support.rendezvous_nodes import is_disconnected

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "train.py"
Told = subprocess.CompletedProcess[str]
TOKEN = "a secret with a : in it, and ümlauts"  # noqa: S105 - of this test alone


@contextlib.contextmanager
def start_three_nodes(directory: Path, step_delay: str) -> Iterator[Cluster]:
    """Train on three nodes with a worker each, which n0 leads."""
    flags = ["--snapshot-every", "1", "--save-every", "10", "--metrics", "0"]
    flags += ["--rdzv-conf", "last_call_timeout=60"]
    env = {constants.ENV_TOKEN: TOKEN, constants.ENV_LOG_LEVEL: "DEBUG"}
    with Cluster(directory, nodes=3, min_nodes=2, flags=flags, env=env) as made:
        arguments = "--step-log", str(directory), "--epochs", "20000", "--step-delay", step_delay
        made.start(SCRIPT, *arguments, only=[0])
        made.wait(lambda: "n0 leads" in made.output(0), "n0 to lead, which n1 would if n0 started late")
        made.start_node(1)
        made.start_node(2)
        made.wait(step=10)
        yield made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes, for tests that end none of them, so that their order does not matter."""
    # A slow rank, and its end, are found after some number of steps.
    with start_three_nodes(tmp_path_factory.mktemp("looked-at"), "0.01") as made:
        yield made


def status(*words: str, token: str = TOKEN) -> Told:
    """Run the command."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv(constants.ENV_TOKEN, token)
        code = cli.main(["status", *words])
    return Told(words, code, out.getvalue(), err.getvalue())


def asked(cluster: Cluster, index: int, look: Callable[[Told], object], token: str = TOKEN) -> Told:
    """Ask that node by name, until it has had the time to answer so."""

    def told() -> Told | None:
        said = status(*by_name(cluster, index), token=token)
        return said if look(said) else None

    return cluster.wait(told, f"n{index} to answer")


def by_name(cluster: Cluster, index: int) -> list[str]:
    """Flags that name one node, as somebody elsewhere would."""
    look = json.loads((cluster.nodes[index].directory / constants.AGENT_ENDPOINT_FILE).read_text())
    return ["--rdzv-endpoint", look["address"], "--rdzv-id", cluster.run_id]


def scrape(cluster: Cluster, index: int) -> dict[str, float]:
    """Read a node's metrics."""
    address = cluster.wait(lambda: re.search(r"metrics at (http://\S+)", cluster.output(index)), "metrics")
    with urllib.request.urlopen(address[1], timeout=20) as answer:  # noqa: S310 - of our own node
        return figures(answer.read().decode())


def figures(text: str) -> dict[str, float]:
    """What a scrape tells, by the name of the metric and a node."""
    families = text_string_to_metric_families(text)
    return {
        f"{item.name}{item.labels.get('node', '')}{item.labels.get('kind', '')}": item.value
        for family in families
        for item in family.samples
    }


def test_status_tells_the_same_whoever_is_asked(cluster: Cluster) -> None:
    """By a directory of this machine, or by any agent's address; a wrong token is refused in words."""

    def settled() -> dict[str, Any] | None:
        told = status(str(cluster.run_dir), "--json")
        said: dict[str, Any] = json.loads(told.stdout) if told.returncode == 0 else {"steps_per_s": 0}
        # A rate needs two pulses, and the first may tell of a checkpoint.
        return (
            said if said["steps_per_s"] and all(item["checkpoint_step"] for item in said["nodes"]) else None
        )

    said = cluster.wait(settled, "all nodes have told of a checkpoint, and of steps since")
    assert said["is_leader"]
    assert (said["world"]["nodes"], said["world"]["ranks"]) == (["n0", "n1", "n2"], 3)
    row = r"\n +2  n2 +\d+ +[\d.]+  \d+, [\d.]+ m?s old +\d+, [\d.]+ m?s old  "
    for index in (0, 2):
        text = asked(cluster, index, lambda told: re.search(row, told.stdout)).stdout
        assert "generation 1, 3 nodes, 3 ranks, led by n0" in text
    refused = "it does not hold the run's token (the token file, or ELASTIC_RESUME_TOKEN)"
    wrong = asked(cluster, 0, lambda told: refused in told.stderr, token="another, as long as it")  # noqa: S106
    assert wrong.returncode == 1
    assert "as long" not in wrong.stderr
    modes = {
        path.stat().st_mode & 0o777 for path in cluster.run_dir.glob(f"*/{constants.AGENT_ENDPOINT_FILE}")
    }
    assert modes == {0o600}
    assert not any(
        TOKEN in path.read_text() for path in cluster.run_dir.glob(f"*/{constants.AGENT_ENDPOINT_FILE}")
    )


def test_metrics_of_leader_cover_the_job_too(cluster: Cluster) -> None:
    """Each node serves its own; a stranger's garbage does no harm."""

    def heard() -> list[dict[str, float]] | None:
        leads, follows = found = [scrape(cluster, index) for index in (0, 1)]
        told = leads.get("elastic_resume_node_stepn0") and follows.get("elastic_resume_node_stepn1")
        return found if told else None

    leads, follows = cluster.wait(heard, "each node to have told how far it is")
    assert (leads["elastic_resume_is_leader"], follows["elastic_resume_is_leader"]) == (1, 0)
    assert leads["elastic_resume_world_ranks"] == 3
    assert "elastic_resume_world_ranks" not in follows
    assert "elastic_resume_node_stepn1" not in leads
    port = int(re.findall(r"metrics at http://127.0.0.1:(\d+)/", cluster.output(0))[0])
    generation = cluster.events("generation-start")[-1]["generation"]
    for data in (secrets.token_bytes(4096), b"GET / HTTP/1.1\r\n" + b"A: " + b"x" * 4_000_000):
        with socket.create_connection(("127.0.0.1", port), 20) as stranger, contextlib.suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            assert is_disconnected(stranger)
    assert scrape(cluster, 0)["elastic_resume_is_leader"] == 1
    assert cluster.events("generation-start")[-1]["generation"] == generation
    step = max(event["step"] for event in cluster.events("step"))
    cluster.wait(step=step + 20)


def test_slow_rank_is_named_by_event_status_and_metrics(cluster: Cluster) -> None:
    """The model has buffers, for which rank 1 waits too. A busy machine may slow another rank, too."""
    cluster.wait(lambda: all(any(record.measurements) for _, record in cluster.rank_progress()), "own times")
    injector = FaultInjector(cluster, [Fault("slow-rank", rank=2, at_s=0.0, delay_s=0.1, for_s=600)])

    def named() -> list[dict[str, Any]]:
        injector.poll()
        return cluster.node_events(2, "slow-rank")

    event = cluster.wait(named, "rank 2 to be named")[0]
    assert (event["node"], event["rank"], event["generation"]) == ("n2", 2, 1)
    assert event["own_s"] > event["others_s"]  # a busy machine may have slowed it before the fault did
    line = "rank 2 is slow, and all others wait for it: it takes"
    assert line in cluster.output(2)
    asked(cluster, 0, lambda told: f"node n2: {line}" in told.stdout)
    factor = "elastic_resume_slow_rankn2"  # absent while a busy machine slows another rank as much
    cluster.wait(lambda: scrape(cluster, 2).get(factor, 0) > 1.3, "the factor among the metrics")
    injector.undo_lasting_faults()
    cluster.wait(lambda: cluster.node_events(2, "slow-rank-ended"), "the end of its slowness")
    injector.close()
    alerts = summary.build_run_report(load_run([cluster.run_dir]).events).alerts
    begin, end = [alert for alert in alerts if alert.kind.startswith("slow-rank") and alert.node == "n2"][:2]
    assert (begin.kind, end.kind) == ("slow-rank", "slow-rank-ended")
    assert line in begin.text


def test_status_names_the_next_leader_and_the_failure(tmp_path: Path) -> None:
    """The next one knows how the dead one ended, though its disk is gone."""
    with start_three_nodes(tmp_path, "0.1") as cluster:
        asked(cluster, 2, lambda told: "led by n0" in told.stdout)
        cluster.kill_node(0)
        cluster.wipe(0)
        next_leads = r"(?s)generation 2, 2 nodes, 2 ranks, led by n1.*node n0 died"
        asked(cluster, 2, lambda told: re.search(next_leads, told.stdout))
        lost = "elastic_resume_incidents_totalnode-lost"  # each agent reads its events once a second
        cluster.wait(lambda: scrape(cluster, 1)[lost] == 1, "n1 to count the lost node")
        assert scrape(cluster, 1)["elastic_resume_is_leader"] == 1
