"""A script that is ported by one line, with real workers, a killed one among them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster


def run_job(directory: Path, **env: str) -> tuple[list[dict[str, object]], list[str]]:
    """Return how each rank ends, and the verdict of each proof."""
    directory.mkdir()
    flags = ["--snapshot-every", "1", "--save-every", "1000", "--prove", "always"]
    with Cluster(directory, nodes=2, flags=flags, env=env) as cluster:
        cluster.start(SCRIPTS / "one_line.py", str(directory))
        assert cluster.wait_exit() == [0, 0], cluster.output(0)
        assert cluster.lost_steps == 0
        ends = [json.loads(path.read_text()) for path in sorted(directory.glob("end-*.json"))]
        return ends, [event["verdict"] for event in cluster.events("proof")]


def test_killed_script_of_one_line_ends_as_undisturbed_one_of_five(tmp_path: Path) -> None:
    """Bit for bit, and the resume within an epoch is proved."""
    whole, _ = run_job(tmp_path / "five", LINES="5")
    killed, verdicts = run_job(tmp_path / "one", LINES="1", KILL="17:1")
    assert len(whole) == 2
    assert whole[0]["step"] == 30
    assert killed == whole
    assert verdicts == ["proved"]
