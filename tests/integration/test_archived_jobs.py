"""Jobs whose nodes and disks all go, and what a kill within an upload leaves in the archive."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_resume.archive.archive import open_archive
from elastic_resume.archive.entries import ArchivedCheckpoint
from elastic_resume.checkpoint.manifest import BLOCK_BYTES
from elastic_resume.testing import Cluster
from tests.integration import test_sharded
from tests.support.s3 import BUCKET, Fault, FaultProxy, s3_environment, serve_s3
from tests.support.training_job import SCRIPT, check_end

pytestmark = pytest.mark.cluster

EPOCHS = 6  # of ten steps
NODES = 2


def make_cluster(directory: Path, names: Sequence[str], *flags: str, workers: int = 1) -> Cluster:
    """Return a cluster whose nodes have these names, with an archive beside it."""
    store = directory.parent / "store"
    store.mkdir(parents=True, exist_ok=True)
    common = [
        "--archive",
        str(store),
        "--archive-every",
        "1s",
        "--save-every",
        "100000",
        "--snapshot-every",
        "1",
    ]
    cluster = Cluster(directory, nodes=len(names), workers_per_node=workers, flags=[*common, *flags])
    rename_nodes(cluster, names)
    return cluster


def rename_nodes(cluster: Cluster, names: Sequence[str]) -> None:
    """Give the nodes of a cluster that was not started these names."""
    for node, name in zip(cluster.nodes, names, strict=True):
        (cluster.run_dir / node.name).unlink()
        node.name, node.directory = name, node.directory.with_name(name)
        (cluster.run_dir / name).symlink_to(node.directory)


def start(cluster: Cluster, log: Path, *words: str, step_delay: float = 0.0, epochs: int = EPOCHS) -> None:
    """Start the job."""
    common = ["--step-log", str(log), "--epochs", str(epochs), "--step-delay", str(step_delay)]
    cluster.start(SCRIPT, *common, *words)


def read_archive(directory: Path) -> list[tuple[int, int]]:
    """Verify all that is archived; return the versions, newest first."""
    archive = open_archive(str(directory / "store"), "job")
    versions = []
    for entry in archive.list_checkpoints(64):
        assert isinstance(entry, ArchivedCheckpoint), entry
        archive.read_image(entry)
        versions.append(entry.version)
    return versions


def test_job_goes_on_from_archive_when_all_nodes_and_disks_are_gone(tmp_path: Path) -> None:
    """Empty nodes with other names begin with the archived step by themselves, and end with equal weights."""
    log = tmp_path / "log"
    with make_cluster(tmp_path / "first", ["n0", "n1"]) as cluster:
        start(cluster, log, step_delay=0.15)
        archived = cluster.wait(lambda: cluster.events("archived"), "an archived checkpoint")[-1]
    shutil.rmtree(tmp_path / "first")
    steps = [step for _, step in read_archive(tmp_path)]
    assert archived["step"] in steps
    with make_cluster(tmp_path / "second", ["x0", "x1"]) as cluster:
        start(cluster, log)
        assert cluster.wait_exit() == [0, 0], cluster.output(0)
        resumed = cluster.events("resume")[0]
        assert (resumed["step"], resumed["source_tier"], resumed["receiving_nodes"]) == (
            max(steps), "archive", ["x1"],
        )  # fmt: skip
        assert f"resumed at step {max(steps)} (epoch " in cluster.output(0)
        assert "archived checkpoint of generation 1, sent to x1" in cluster.output(0)
        started = cluster.events("generation-start") + cluster.events("worker-start")
        assert {event["generation"] for event in started} == {2}, "agents and workers count alike"
        report = cluster.report_text()
        assert "No failure" in report, report
        assert re.findall(r"^ +(\d+)  x0 x1 ", report, re.MULTILINE) == ["2"], report
    assert read_archive(tmp_path)[0] == (2, EPOCHS * 10), "the last checkpoint is archived too"
    with make_cluster(tmp_path / "calm" / "job", ["n0", "n1"]) as cluster:
        start(cluster, tmp_path / "calm" / "log")
        assert cluster.wait_exit() == [0, 0], cluster.output(0)
    expected = check_end(tmp_path / "calm" / "log", world_size=NODES, epochs=EPOCHS)
    assert check_end(log, world_size=NODES, epochs=EPOCHS) == expected


@pytest.mark.soak
def test_sharded_job_goes_on_from_archive(tmp_path: Path) -> None:
    """Each node puts parts of the whole state, of which its ranks hold shards; the weights are equal."""
    epochs, steps = ["--epochs", "4"], 4 * test_sharded.STEPS
    undisturbed = test_sharded.train(tmp_path / "undisturbed", 2, 2, [], *epochs)
    log = tmp_path / "log"
    log.mkdir()
    words = ["--losses", str(log), *epochs]
    with make_cluster(tmp_path / "first", ["n0", "n1"], workers=2) as cluster:
        cluster.start(test_sharded.SCRIPT, *words, "--step-delay", "0.1")
        cluster.wait(lambda: cluster.events("archived"), "an archived checkpoint")
    shutil.rmtree(tmp_path / "first")
    newest = read_archive(tmp_path)[0]
    assert newest < (1, steps)
    with make_cluster(tmp_path / "second", ["x0", "x1"], workers=2) as cluster:
        cluster.start(test_sharded.SCRIPT, *words)
        assert cluster.wait_exit() == [0, 0], cluster.output(0)
        resumed = cluster.events("resume")[0]
        assert (resumed["step"], resumed["source_tier"]) == (newest[1], "archive")
    found, expected = test_sharded.read_losses(log), test_sharded.read_losses(undisturbed)
    assert len(found) == steps
    whole = {step: set(next(iter(losses.values()))) for step, losses in expected.items()}
    assert all(set(ranks) <= whole[step] for step, losses in found.items() for ranks in losses.values())
    assert test_sharded.read_ends(log) == test_sharded.read_ends(undisturbed)


PARTS = ["--width", "300000"]  # 75 MB, two parts
WIDE = ["--width", "400000"]  # 100 MB, seven blocks
POINTS = ["archive.put-part", "archive.part-put", "archive.before-entry", "archive.after-entry"]


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS)
def test_node_killed_in_upload_leaves_step_before_or_this_one(tmp_path: Path, point: str) -> None:
    """The other nodes go on with the same upload, and no part is left behind."""
    flags = ["--rdzv-conf", "last_call_timeout=10"]
    with make_cluster(tmp_path / "job", ["n0", "n1", "n2"], *flags) as cluster:
        cluster.env["ELASTIC_RESUME_FAILPOINTS"] = f"{point}=kill;once=archive"
        log = tmp_path / "log"
        start(cluster, log, *PARTS, step_delay=0.2)

        def find_dead() -> list[int]:
            return [index for index, node in enumerate(cluster.nodes) if not node.alive]

        (killed,) = cluster.wait(find_dead, "a node to be killed in its upload")
        before = read_archive(tmp_path)
        assert len(before) == (point == "archive.after-entry")
        cluster.kill_node(killed)
        cluster.start_node(killed)
        cluster.wait(lambda: len(cluster.events("archived")) > 1, "two archived checkpoints")
        cluster.stop()
    assert len(read_archive(tmp_path)) >= 2
    archive = open_archive(str(tmp_path / "store"), "job")
    named = {
        entry.header.parts for entry in archive.list_checkpoints(64) if isinstance(entry, ArchivedCheckpoint)
    }
    assert len(set(archive.list_attempts()) - named) <= 1, "only that of an upload under way"


def test_training_goes_on_while_archive_fails(tmp_path: Path) -> None:
    """The reason is logged with its remedy, and uploads begin once it is gone."""
    parts = tmp_path / "store" / "job" / "parts"
    parts.parent.mkdir(parents=True)
    parts.touch()  # in the place of a directory: it can be listed, but nothing can be put there
    with make_cluster(tmp_path / "job", ["n0"]) as cluster:
        start(cluster, tmp_path / "log", "--fast-from", str(tmp_path / "fast"), step_delay=0.2)
        cluster.wait(lambda: cluster.events("archive-failed"), "an error of the archive")
        step = cluster.wait(step=1)["step"]
        cluster.wait(step=step + 1)
        assert "Training continues, and this node tries again." in cluster.output(0)
        parts.unlink()
        cluster.wait(lambda: cluster.events("archived"), "an archived checkpoint")
        assert "uploads to the archive work again." in cluster.output(0)
        (tmp_path / "fast").touch()
        assert cluster.wait_exit() == [0], cluster.output(0)
    assert read_archive(tmp_path)[0] == (1, EPOCHS * 10)


@pytest.mark.parametrize("nodes", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_stopped_job_archives_its_last_step(tmp_path: Path, nodes: int) -> None:
    """One node does, if there is time: how fast the archive is, is known from an upload before."""
    with make_cluster(tmp_path / "job", [f"n{index}" for index in range(nodes)], "--grace", "20s") as cluster:
        start(cluster, tmp_path / "log", step_delay=0.2)
        step = cluster.wait(lambda: cluster.events("archived"), "an archived checkpoint")[0]["step"]
        cluster.wait(step=step + 1)
        for index in range(nodes):
            cluster.kill_agent(index, signal.SIGTERM)
        assert cluster.wait_exit() == [128 + signal.SIGTERM] * nodes
        newest = cluster.checkpoints(0)[0].version
        assert read_archive(tmp_path)[0] == newest, "".join(map(cluster.output, range(nodes)))


@pytest.mark.soak  # unit/mechanisms/archive/test_last_upload.py has the parts of it
def test_job_ends_with_its_grace_though_the_store_hangs(tmp_path: Path) -> None:
    """Training is over, and the last checkpoint is on its way; no thread holds the process at its exit."""
    with serve_s3() as port:
        proxy = FaultProxy(port)
        flags = ["--archive", f"s3://{BUCKET}/jobs", "--archive-every", "1h", "--grace", "3s"]
        with proxy.serve() as front, make_cluster(tmp_path / "job", ["n0"], *flags) as cluster:
            cluster.env.update(s3_environment(front))
            start(cluster, tmp_path / "log", step_delay=0.1)
            cluster.wait(lambda: cluster.events("archived"), "an archived checkpoint")
            with proxy.lock:
                proxy.faults.append(Fault("PUT", "/parts/", "hang"))
            cluster.wait(lambda: "before this node ends" in cluster.output(0), "the last upload")
            began = time.monotonic()
            cluster.kill_agent(0, signal.SIGTERM)
            assert cluster.wait_exit() == [0], cluster.output(0)
            assert time.monotonic() - began < 15, "one request takes longer than that"
            assert "Its upload took too long, and this node must end. It is in " in cluster.output(0)


@pytest.mark.soak  # test_attempt.py has the same with threads as nodes
def test_empty_nodes_read_an_object_store_once(tmp_path: Path) -> None:
    """The job's last checkpoint goes to a real S3 server; three new nodes read different blocks of it."""
    with serve_s3() as port, contextlib.ExitStack() as stack:
        proxies = [FaultProxy(port) for _ in range(3)]
        fronts = [stack.enter_context(proxy.serve()) for proxy in proxies]
        flags = ["--archive", f"s3://{BUCKET}/jobs", "--archive-every", "1h"]
        with make_cluster(tmp_path / "first", ["n0", "n1"], *flags) as cluster:
            cluster.env.update(s3_environment(port))
            start(cluster, tmp_path / "log", *WIDE, epochs=1)
            assert cluster.wait_exit() == [0, 0], cluster.output(0)
            archived = cluster.events("archived")[-1]
            assert archived["step"] == 10, cluster.output(0)
        with make_cluster(tmp_path / "second", ["x0", "x1", "x2"], *flags) as cluster:
            cluster.start(SCRIPT, "--step-log", str(tmp_path / "log"), "--epochs", "2", *WIDE, only=[])
            for index, front in enumerate(fronts):
                cluster.start_node(index, env=s3_environment(front))
            assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
            resumed = cluster.events("resume")[0]
            assert (resumed["step"], resumed["source_tier"]) == (10, "archive")
            assert len(resumed["receiving_nodes"]) == 2
        reads = [
            [name for name in proxy.requests if name.startswith("GET") and "/parts/g" in name]
            for proxy in proxies
        ]
        blocks = -(-int(archived["bytes"]) // BLOCK_BYTES)
        assert sorted(map(len, reads)) == sorted(len(range(share, blocks, 3)) for share in range(3))


def test_nodes_with_different_archives_do_not_start(tmp_path: Path) -> None:
    """The node of rank 0 has none, so it would start over beside what is archived."""
    archive_flags = ["--archive", str(tmp_path)]
    with Cluster(tmp_path / "job", nodes=2) as cluster:
        cluster.start(SCRIPT, "--step-log", str(tmp_path / "log"), only=[])
        cluster.start_node(0)
        cluster.start_node(1, flags=archive_flags)
        assert 0 not in cluster.wait_exit()
        assert f"--archive differs between nodes (n0: off; n1: {tmp_path})" in cluster.output(0)
        assert not any(event["step"] for event in cluster.events("resume"))
    assert not (tmp_path / "log").exists()
