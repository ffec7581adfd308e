"""Resumes that prove themselves: the newest steps are computed again, and compared on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_resume.events import Event
from elastic_resume.testing import Cluster
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster


@dataclass(frozen=True)
class Outcome:
    """What a job has done: its proofs, its starts, each rank's digest of the end, and its output."""

    proofs: list[Event]
    resumes: list[Event]
    ends: list[str]
    output: str
    exit_codes: list[int]
    lost_steps: int

    @property
    def verdicts(self) -> list[str]:
        """The verdict of each proof."""
        return [event["verdict"] for event in self.proofs]

    @property
    def starts(self) -> list[tuple[int, int]]:
        """Generation and step of each start."""
        return [(event["generation"], event["step"]) for event in self.resumes]


def run_job(
    directory: Path, kind: str, kills: str, *, prove: str = "first", failpoints: str = "", flags: str = ""
) -> Outcome:
    """Run the script with a snapshot at each step."""
    directory.mkdir()
    env = {"KIND": kind, "KILLS": kills, "ELASTIC_RESUME_FAILPOINTS": failpoints}
    all_flags = ["--snapshot-every", "1", "--save-every", "1000", "--prove", prove, *flags.split()]
    with Cluster(directory, nodes=2, flags=all_flags, env=env) as cluster:
        cluster.start(SCRIPTS / "proved.py", str(directory))
        codes = cluster.wait_exit()
        ends = [json.loads(path.read_text()) for path in sorted(directory.glob("end-*.json"))]
        output = "".join(cluster.output(node) for node in range(2))
        return Outcome(
            cluster.events("proof"), cluster.events("resume"), ends, output, codes, cluster.lost_steps
        )


@pytest.fixture(scope="module")
def ends_without(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[str]]:
    """Return a function that returns how a job ends without proofs; each job runs once."""
    found: dict[tuple[str, str], list[str]] = {}

    def find(kind: str, kills: str = "") -> list[str]:
        if (kind, kills) not in found:
            directory = tmp_path_factory.mktemp("without") / "job"
            found[kind, kills] = run_job(directory, kind, kills, prove="off").ends
        return found[kind, kills]

    return find


Ends = Callable[..., list[str]]


def test_what_a_script_changes_while_it_trains_is_restored(tmp_path: Path, ends_without: Ends) -> None:
    """Frozen parameters, a group of the optimizer, and a buffer that the first batch makes."""
    job = run_job(tmp_path / "job", "unfreezing", "1:17:1")
    assert (job.verdicts, job.exit_codes) == (["proved"], [0, 0])
    assert job.ends == ends_without("unfreezing")
    assert "WARNING" not in job.output


@pytest.mark.parametrize("kind", ["right", pytest.param("restartable", marks=pytest.mark.soak)])
def test_first_resume_of_a_right_script_is_proved_and_later_ones_are_not_repeated(
    tmp_path: Path, kind: str, ends_without: Ends
) -> None:
    """The second kill costs no proof. The end is that of an undisturbed run."""
    job = run_job(tmp_path / "job", kind, "1:7:1,2:14:0")
    assert (job.verdicts, job.exit_codes) == (["proved"], [0, 0])
    assert [step for _, step in job.starts] == [0, job.proofs[0]["first_step"], 14]
    assert job.proofs[0]["step"] == 7
    assert [event["recomputed_steps"] for event in job.resumes] == [0, 0, 0]
    assert job.ends == ends_without("right")


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("index", "optimizer/param_groups/0/lr: was 0.0"),
        pytest.param("counter", "model/", marks=pytest.mark.soak),
    ],
)
def test_wrong_resume_is_named_and_the_job_goes_back(
    tmp_path: Path, kind: str, named: str, ends_without: Ends
) -> None:
    """It ends with the bits that it would have without a proof, and no step is lost."""
    job = run_job(tmp_path / "job", kind, "1:7:1", flags="--max-restarts 1")  # the way back does not count
    assert (job.verdicts, job.exit_codes) == (["not proved"], [0, 0])
    assert named in job.proofs[0]["message"]
    assert [step for _, step in job.starts] == [0, job.proofs[0]["first_step"], 7]
    assert "goes back to what it had" in job.output
    assert job.lost_steps == 0
    assert job.ends == ends_without(kind, "1:7:1")


def test_failed_proof_ends_the_job_on_request(tmp_path: Path) -> None:
    """With ``--prove stop``. The state that the run had is still there."""
    job = run_job(tmp_path / "job", "index", "1:7:1", prove="stop")
    assert job.verdicts == ["not proved"]
    assert all(job.exit_codes)
    assert "is not proved: the job ends (--prove stop)" in job.output


def test_error_in_the_steps_that_are_computed_again_is_no_failure(tmp_path: Path, ends_without: Ends) -> None:
    """Though it says that a restart would not help. The job goes on from what it had."""
    job = run_job(tmp_path / "job", "raise", "1:7:1", flags="--max-restarts 1")
    assert job.exit_codes == [0, 0]
    assert [step for _, step in job.starts][-1] == 7
    assert "which computed steps again to prove its resume, ended with exit code 1: UsageError" in job.output
    assert job.ends == ends_without("right")


@pytest.mark.parametrize(
    ("kind", "kills", "failpoints"),
    [
        ("right", "1:7:1,2:6:0", ""),  # within the replay
        # On the way back.
        pytest.param("index", "1:7:1", "proof.judged=kill;rank=1;once=x", marks=pytest.mark.soak),
    ],
)
def test_kill_during_a_proof_costs_no_step(
    tmp_path: Path, kind: str, kills: str, failpoints: str, ends_without: Ends
) -> None:
    """The next start is the kept state, without a proof."""
    job = run_job(tmp_path / "job", kind, kills, failpoints=failpoints)
    assert job.exit_codes == [0, 0]
    assert [step for _, step in job.starts][-1] == 7
    assert len(job.starts) == 3
    assert job.ends == (ends_without("right") if kind == "right" else ends_without(kind, "1:7:1"))
