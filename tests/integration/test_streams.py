"""Streams of shards in real worlds: each sample once per epoch, and the same run after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.testing import Cluster, Fault, assert_same_run
from tests.support.paths import SCRIPTS
from tests.support.scripts.stream import EPOCHS, SIZES

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SCRIPT = SCRIPTS / "stream.py"
EVERY = [[shard, number] for shard, size in enumerate(SIZES) for number in range(size)]
HOLD = 3  # steps of each world before the whole one


def read_counted_samples(cluster: Cluster, kept: Path) -> dict[int, list[Any]]:
    """Return the samples of each epoch whose step counts: the next generation did not begin before it."""
    starts = {event["generation"]: event["step"] for event in cluster.events("resume")}
    found: dict[int, list[Any]] = {epoch: [] for epoch in range(EPOCHS)}
    for path in kept.glob("g*.jsonl"):
        generation = int(path.stem.partition("-")[0].removeprefix("g"))
        end = min((step for later, step in starts.items() if later > generation), default=1 << 60)
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["step"] <= end:
                found[entry["epoch"]] += entry["samples"]
    return found


def test_each_sample_is_read_once_while_the_world_changes(tmp_path: Path) -> None:
    """3 -> 2 -> 4 ranks in one epoch, by a kill in the middle of a step and by two nodes that join.

    Worlds of 4 and 2 ranks read in the main process, that of 3 in two workers of each rank.
    """
    kept = tmp_path / "diary"
    kept.mkdir()
    flags = ["--snapshot-every", "1", "--save-every", "1000", "--hang-timeout", "0"]
    with Cluster(tmp_path, nodes=4, min_nodes=2, flags=flags) as cluster:

        def wait_for_world(size: int) -> None:
            cluster.wait(lambda: len(list(kept.glob(f"held-*-{size}"))) >= size, f"{size} ranks that hold")

        cluster.start(SCRIPT, str(kept), "0,2", str(HOLD), only=range(3))
        wait_for_world(3)
        cluster.kill_node(2)
        wait_for_world(2)
        for index in (2, 3):
            cluster.start_node(index)
        assert cluster.wait_exit() == [0] * 4, cluster.output(0)
        resumes = cluster.events("resume")
        assert {3, 2} <= {event["world_size"] for event in resumes}
        assert resumes[-1]["world_size"] == 4
        last = (kept / f"g{resumes[-1]['generation']}-r0.jsonl").read_text().splitlines()
        assert json.loads(last[0])["epoch"] == 0, "the whole world did not join in the first epoch"
        found = read_counted_samples(cluster, kept)
    assert {epoch: sorted(samples) for epoch, samples in found.items()} == dict.fromkeys(range(EPOCHS), EVERY)


@pytest.mark.soak
def test_killed_run_equals_undisturbed_run() -> None:
    """Samples, random inputs, losses and weights, with workers that read ahead.

    Step 55 is the first epoch's last one, so the second kill comes before or after the epoch's end.
    """
    faults = [Fault("kill-worker", rank=1, step=7), Fault("kill-worker", rank=0, step=55)]
    assert_same_run(SCRIPT, "-", "2", faults=faults, nodes=1, workers_per_node=2, lines="^step")
