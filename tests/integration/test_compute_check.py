"""A worker whose gradients are wrong is named at the next check, and its node leaves at the second."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.report import summary
from elastic_resume.report.loader import load_run
from elastic_resume.testing import Cluster
from elastic_resume.testing.fault_runner import FaultInjector
from elastic_resume.testing.faults import Fault
from tests.support.training_job import SCRIPT

pytestmark = pytest.mark.cluster

FLAGS = ["--snapshot-every", "1", "--check-compute-every", "4"]


def test_rank_with_wrong_gradients_is_named_and_its_node_leaves(tmp_path: Path) -> None:
    """Its gradients are wrong in one bit from the end of step 6. Replicas stay equal: all get the average."""
    with Cluster(tmp_path, nodes=3, min_nodes=2, flags=FLAGS) as cluster:
        cluster.start(SCRIPT, "--step-log", str(tmp_path / "step_log"), "--epochs", "4")
        injector = FaultInjector(cluster, [Fault("wrong-gradients", rank=1, step=6)])
        injector.poll()
        codes = cluster.wait_exit()
        injector.poll()
        checks, found = cluster.events("compute-check"), cluster.events("gradients-differ")
        hit = next(event["node"] for event in cluster.events("worker-start") if event["rank"] == 1)
        assert [check["step"] for check in checks if check["is_equal"]][:3] == [4, 4, 4]
        assert [(event["step"], event["times"]) for event in found] == [(8, 1), (12, 2)]
        assert {event["node"] for event in found} == {hit}
        assert {(event["rank"], event["agreed_step"]) for event in found} == {(1, 4)}
        assert sorted(codes) == [0, 0, 75]
        assert codes[int(hit[1:])] == 75
        assert not cluster.events("replicas-differ")
        report = summary.build_run_report(load_run([cluster.run_dir]).events)
        assert any(
            f"rank 1 on {hit} computes other gradients than the majority" in alert.text
            for alert in report.alerts
        )
