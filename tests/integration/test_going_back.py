"""Whole jobs go back with --resume-from; test_milestones.py has single processes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from elastic_resume.archive.archive import open_archive
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.testing import Cluster
from tests.integration.test_archived_jobs import rename_nodes
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "proved.py"
FLAGS = ["--snapshot-every", "1", "--save-every", "3", "--keep", "2", "--prove", "off"]
BACK = ["--resume-from", "good"]
NODES = 3 if "ELASTIC_RESUME_SOAK_KILLS" in os.environ else 2
Flags = Mapping[int, list[str]]
NO_FLAGS: Flags = {}


class Job:
    """A job of the script, started again and again."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = range(len(cluster.nodes))

    def start(self, flags: Flags = NO_FLAGS, only: Sequence[int] = (), **env: str) -> None:
        """Start all nodes or ``only`` some, with ``flags`` of each."""
        settings = {"SPIKE": "1000", "SAVES": "", "KILLS": "", "PAUSE": "0", "FAILPOINTS": "", **env}
        settings["ELASTIC_RESUME_FAILPOINTS"] = settings.pop("FAILPOINTS")
        self.cluster.env.update(settings)
        self.cluster.start(SCRIPT, str(self.cluster.directory), only=())
        for index in only or self.nodes:
            self.cluster.start_node(index, flags=flags.get(index, ()))

    def run(self, flags: Flags = NO_FLAGS, only: Sequence[int] = (), **env: str) -> list[int]:
        """Start nodes, and return the exit codes."""
        self.start(flags, only, **env)
        return self.cluster.wait_exit()

    @property
    def ends(self) -> set[str]:
        """The digests with which the ranks have ended."""
        return {json.loads(path.read_text()) for path in self.cluster.directory.glob("end-*.json")}

    @property
    def starts(self) -> list[tuple[int, str | None]]:
        """The step of each start, and the request if it went back."""
        return [(event["step"], event["resume_from"]) for event in self.cluster.events("resume")]

    def requests(self, index: int) -> set[str]:
        """Return the requests from which the states on a node's disk descend, milestones aside."""
        found = (e for e in self.cluster.checkpoints(index) if e.manifest is not None and not e.milestones)
        return {
            way.request for entry in found if entry.manifest is not None for way in entry.manifest.ways_back
        }

    def moved(self, index: int) -> list[str]:
        """Return the names in a node's quarantine."""
        found = Catalog(self.cluster.nodes[index].directory, None).list_quarantined()
        return [path.name for path in found]


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that makes a job of some nodes; all are stopped at the end."""
    clusters: list[Cluster] = []

    def make(name: str = "job", nodes: int = NODES, **options: object) -> Job:
        clusters.append(Cluster(tmp_path / name, nodes=nodes, flags=FLAGS, **options))  # type: ignore[arg-type]
        return Job(clusters[-1])

    yield make
    for cluster in clusters:
        cluster.stop()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The end of a run that never went further than it should."""
    with Cluster(tmp_path_factory.mktemp("expected"), nodes=NODES, flags=FLAGS) as cluster:
        job = Job(cluster)
        assert job.run() == [0] * NODES
        return job.ends


def test_job_goes_back_once_whatever_repeats_the_request(
    make_job: Callable[..., Job], expected: set[str]
) -> None:
    """One node has the flag. A worker is killed after it, and the same commands come again at the end."""
    job = make_job()
    assert job.run(SAVES="5:good", SPIKE="12") == [0] * NODES
    assert job.ends != expected
    assert job.run({1: BACK}, KILLS="3:8:1") == [0] * NODES
    assert job.ends == expected
    assert job.run({1: BACK}) == [0] * NODES
    assert job.starts == [(0, None), (5, "good"), (8, None), (20, None)]
    for index in job.nodes:
        assert job.requests(index) == {"good"}
        assert "g000001-s0000000020" in job.moved(index)
    assert job.cluster.lost_steps == 0
    report, output = job.cluster.report_text(), job.cluster.output(0)
    assert "went back to step 5, as --resume-from good requested; 15 newer steps given up" in report
    assert "quarantined" not in report
    assert "(done once: the same command goes on from here): 15 newer steps given up; what nodes" in output
    assert "--resume-from good was done before, so it goes on from the newest state" in output
    outputs = [job.cluster.output(index) for index in job.nodes]
    assert [text.count("step 5 is saved as milestone 'good'.") for text in outputs] == [1, *[0] * (NODES - 1)]


@pytest.mark.soak
def test_new_nodes_go_back_to_an_archived_milestone(
    make_job: Callable[..., Job], expected: set[str], tmp_path: Path
) -> None:
    """All nodes and disks go while the job trains. Its milestone was archived at once."""
    (tmp_path / "store").mkdir()
    env = {"ELASTIC_RESUME_ARCHIVE": str(tmp_path / "store"), "ELASTIC_RESUME_ARCHIVE_EVERY": "1h"}
    archive = open_archive(env["ELASTIC_RESUME_ARCHIVE"], "job")
    job = make_job("first", env=env)
    job.start(SAVES="5:good", SPIKE="7", PAUSE="0.3")
    job.cluster.wait(lambda: (1, 5) in archive.list_milestones(), "an archived milestone")
    assert not job.ends
    job.cluster.stop()
    shutil.rmtree(job.cluster.directory)
    job = make_job("second", env=env)
    rename_nodes(job.cluster, [f"x{index}" for index in range(NODES)])
    assert job.run({1: BACK}) == [0] * NODES, job.cluster.output(0)
    assert job.ends == expected
    assert job.starts == [(5, "good")]
    (resumed, *_) = job.cluster.events("resume")
    assert resumed["source_tier"] == "archive"
    assert archive.find_newest() == (2, 20, 2)
    # Now the nodes hold the newest, and the first one, which reads the archive, has no flag.
    assert job.run({1: ["--resume-from", "g1-s5"]}) == [0] * NODES, job.cluster.output(0)
    assert job.ends == expected
    assert job.starts[-1] == (5, "g000001-s0000000005")


POINTS = (
    *("resume.planned", "resume.loaded", "going-back.before-commit", "commit.before-rename"),
    *("commit.after-rename", "going-back.after-commit", "going-back.move-aside"),
)


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS)
def test_kill_on_the_way_back_changes_no_bit(
    make_job: Callable[..., Job], expected: set[str], point: str
) -> None:
    """Of the worker on one node; in a commit it is the agent, and its command comes again."""
    job = make_job()
    assert job.run(SAVES="5:good", SPIKE="12") == [0, 0, 0]
    job.start(dict.fromkeys(job.nodes, BACK), FAILPOINTS=f"{point}=kill;node=n1;once=back")
    job.cluster.wait((job.cluster.directory / "armed" / "back.fired").exists, "the kill")
    if "commit" in point.partition(".")[0]:
        job.cluster.wait(lambda: not job.cluster.nodes[1].alive, "the end of the agent")
        job.cluster.start_node(1, flags=BACK)
    assert job.cluster.wait_exit() == [0, 0, 0]
    assert job.ends == expected
    assert [job.requests(index) for index in job.nodes] == [{"good"}] * 3
    assert all("g000001-s0000000020" in job.moved(index) for index in job.nodes)
    assert job.starts[-1][0] >= 5
    assert job.cluster.lost_steps == 0


@pytest.mark.soak
def test_nodes_that_request_different_states_end_the_job(make_job: Callable[..., Job]) -> None:
    """The error names them; nothing moves."""
    job = make_job(nodes=2)
    assert job.run(SAVES="5:good", SPIKE="12") == [0, 0]
    assert all(job.run({0: BACK, 1: ["--resume-from", "9"]}))
    assert "--resume-from differs between nodes (n0: good; n1: 9). Give all nodes" in job.cluster.output(0)
    assert [job.moved(index) for index in job.nodes] == [[], []]


@pytest.mark.soak
def test_late_node_with_newer_states_of_the_old_history_does_not_win(make_job: Callable[..., Job]) -> None:
    """It was absent when the others went back. Its milestone counts no more, and is kept."""
    job = make_job(min_nodes=2)
    assert job.run(SAVES="5:good,18:late", SPIKE="12") == [0, 0, 0]
    assert job.run({0: BACK}, only=[0, 1])[:2] == [0, 0]
    assert job.run() == [0, 0, 0]
    assert job.starts[1:] == [(5, "good"), (20, None)]
    assert {"g000001-s0000000018", "g000001-s0000000020"} <= set(job.moved(2))
    assert job.requests(2) == {"good"}


@pytest.mark.soak
def test_rejoining_node_takes_survivors_back(make_job: Callable[..., Job]) -> None:
    """Their agents hold newer snapshots in memory, and their workers do not know the flag."""
    job = make_job(min_nodes=2)
    job.start(only=[0, 1], SAVES="5:good", PAUSE="0.1")
    job.cluster.wait(step=9)
    job.start({2: BACK}, only=[2], PAUSE="0.1")
    assert job.cluster.wait_exit() == [0, 0, 0]
    assert (5, "good") in job.starts
    assert [job.requests(index) for index in job.nodes] == [{"good"}] * 3
    assert len(job.ends) == 1


@pytest.mark.soak
def test_sharded_job_keeps_its_milestone_and_goes_back(make_job: Callable[..., Job]) -> None:
    """Each node's ranks hold the model together, and commit together."""
    ends = []
    for spike in ("1000", "12"):
        job = make_job(f"job-{spike}", nodes=2, workers_per_node=2, env={"SHARDED": "1"})
        assert job.run(SAVES="5:good", SPIKE=spike) == [0, 0]
        ends.append(job.ends)
    assert ends[0] != ends[1]
    assert all(any(each.milestones for each in job.cluster.checkpoints(index)) for index in job.nodes)
    assert job.run({0: BACK}) == [0, 0]
    assert job.ends == ends[0]
    assert job.starts[1:] == [(5, "good")]
