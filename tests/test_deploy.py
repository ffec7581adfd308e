"""What ships under deploy/, as far as it takes no cluster; for Kubernetes see test_manifest.py.

The Slurm script runs for real, with stand-ins for `srun` and `scontrol` that note how they were called.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from elastic_resume import config, contract
from elastic_resume.cluster import sbatch

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
ALLOCATION, ARRAY = DEPLOY / "slurm" / "train.sbatch", DEPLOY / "slurm" / "array.sbatch"


def flags(words: list[str]) -> argparse.Namespace:
    """What `elastic-resume run` makes of these words; an unknown flag ends the test."""
    parser = get_args_parser()
    config.add_flags(parser)
    return parser.parse_args(words)


# ---- the image ---------------------------------------------------------------------------------------


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    """Every COPY from the source tree; the .dockerignore lets in just these."""
    text = (DEPLOY / "Dockerfile").read_text()
    copies = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    sources = {word for words in copies if not words[0].startswith("--from") for word in words}
    assert [source for source in sources if not (ROOT / source).exists()] == []
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == sources


def test_the_agent_is_the_child_of_tini_in_the_container(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell in its place would swallow SIGTERM: the form is a list, and names a command of this package."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    lines = [line.partition(" ")[::2] for line in text.splitlines()]
    (form,) = (rest for instruction, rest in lines if instruction == "ENTRYPOINT")
    assert "install --yes --no-install-recommends tini" in text
    first, dashes, program, *words = json.loads(form)
    assert (first, dashes) == ("tini", "--")
    (script,) = entry_points(group="console_scripts", name=program)
    assert script.value.startswith("elastic_resume.")
    monkeypatch.setattr("sys.argv", [program, *words, "--help"])
    with pytest.raises(SystemExit) as end:
        sys.exit(script.load()())
    assert not end.value.code
    assert "usage: elastic-resume run" in capsys.readouterr().out


# ---- Slurm -------------------------------------------------------------------------------------------

STAND_IN = """#!/bin/bash
printf '%s\\n' "$@" '' >> "$CALLS/$(basename "$0")"
case "$(basename "$0") $1" in
  "srun --overlap") ;;
  "srun "*) exit "$SRUN_EXIT" ;;
  "scontrol requeue") exit "$REQUEUE_EXIT" ;;
  "scontrol show") echo "JobId=1 JobName=j $SHOWN" ;;
esac
"""


@dataclass(frozen=True)
class Ended:
    """How the batch script ended, and each call of the stand-ins as a list of words."""

    code: int
    stderr: str
    srun: list[list[str]]
    scontrol: list[list[str]]

    @property
    def agents(self) -> list[str]:
        """The words with which the agents are started."""
        (words,) = (words for words in self.srun if words[0] != "--overlap")
        return words

    @property
    def requeues(self) -> list[list[str]]:
        """What Slurm was asked to queue again."""
        return [call for call in self.scontrol if call[0] == "requeue"]


def submit(
    tmp_path: Path, script: Path, *words: str, srun_exit: int = 0, requeue_exit: int = 0, **variables: str
) -> Ended:
    """Run a batch script in the environment that Slurm would give it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path),
        "SRUN_EXIT": str(srun_exit),
        "REQUEUE_EXIT": str(requeue_exit),
        "REQUEUE_RETRY_S": "0",
        "WATCH_DELAY_S": "0",
        "SHOWN": "JobState=RUNNING Reason=None PreemptTime=None",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_CPUS_ON_NODE": "8",
        "SLURMD_NODENAME": "n7",
        **variables,
    }
    command = ["bash", str(script), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return Ended(done.returncode, done.stderr, calls(tmp_path / "srun"), calls(tmp_path / "scontrol"))


def calls(path: Path) -> list[list[str]]:
    """Read what a stand-in noted: words by line, calls divided by an empty line."""
    text = path.read_text() if path.exists() else ""
    return [call.split("\n") for call in text.split("\n\n") if call]


ELEMENT: dict[str, Any] = {
    "SLURM_ARRAY_JOB_ID": "1234567",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_JOB_NUM_NODES": "1",
}
both = pytest.mark.parametrize("script", [ALLOCATION, ARRAY], ids=["allocation", "array"])


@both
def test_sbatch_sees_the_options_that_a_flaky_cluster_needs(script: Path) -> None:
    """They stand before the first command, where sbatch stops reading; bash reads the rest."""
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    head = script.read_text().split("\nset -uo")[0]
    options = set(re.findall(r"^#SBATCH (\S+)$", head, re.MULTILINE))
    assert {"--requeue", "--open-mode=append", "--ntasks-per-node=1"} <= options
    assert ("--no-kill" in options) == (script == ALLOCATION)
    assert ("--array=0-2" in options) == (script == ARRAY)


@both
def test_agents_get_the_words_as_they_are_and_nothing_else(tmp_path: Path, script: Path) -> None:
    """What they need is in Slurm's variables; only what an array is has to be said."""
    ended = submit(tmp_path, script, "train.py", "--lr", "0.1 0.2", **ELEMENT)
    assert ended.code == 0
    words = ended.agents
    own = ["--array-elements=nodes"] if script == ARRAY else []
    assert words[words.index("elastic-resume") + 1 :] == ["run", *own, "train.py", "--lr", "0.1 0.2"]


def test_the_end_of_one_agent_of_an_allocation_ends_no_other(tmp_path: Path) -> None:
    """Whatever its exit code, whether its node is lost; two other nodes look whether the first is there."""
    ended = submit(tmp_path, ALLOCATION, "train.py")
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(ended.agents)
    (watch,) = (words for words in ended.srun if words[0] == "--overlap")
    assert {"--relative=1", "--nodes=2", "--ntasks=2", "--no-kill"} <= set(watch)


@pytest.mark.parametrize(("nodes", "others"), [("1", None), ("2", "--nodes=1"), ("64", "--nodes=2")])
def test_as_many_nodes_watch_as_there_are_up_to_two(tmp_path: Path, nodes: str, others: str | None) -> None:
    """A job of one node has nobody to watch it, and needs none."""
    ended = submit(tmp_path, ALLOCATION, "train.py", SLURM_JOB_NUM_NODES=nodes)
    watches = [words for words in ended.srun if words[0] == "--overlap"]
    assert [others in words for words in watches] == [True] * (others is not None)


@both
def test_the_code_that_asks_for_it_requeues_an_element_alone(tmp_path: Path, script: Path) -> None:
    """Its job id may be the whole array's: requeueing that takes the siblings along."""
    ended = submit(tmp_path, script, "train.py", srun_exit=contract.EXIT_REQUEUE, **ELEMENT)
    assert (ended.code, ended.requeues) == (0, [["requeue", "1234567_2"]])


def test_a_job_that_is_no_array_is_requeued_by_its_number(tmp_path: Path) -> None:
    """The one that Slurm gives it."""
    ended = submit(tmp_path, ALLOCATION, "train.py", srun_exit=contract.EXIT_REQUEUE)
    assert ended.requeues == [["requeue", "1234567"]]


@both
@pytest.mark.parametrize(
    ("code", "shown", "requeues"),
    [
        (143, "JobState=RUNNING Reason=None PreemptTime=2026-11-21T00:00:00", 1),
        (143, "JobState=COMPLETING Reason=None PreemptTime=None", 0),
        (75, "JobState=COMPLETING Reason=None PreemptTime=None", 0),
        (1, "JobState=RUNNING Reason=None PreemptTime=2026-11-21T00:00:00", 0),
    ],
)
def test_slurms_word_decides_where_agents_cannot_ask(
    tmp_path: Path, script: Path, code: int, shown: str, requeues: int
) -> None:
    """A preempted job would be over; one that is being cancelled would be brought back."""
    ended = submit(tmp_path, script, "train.py", srun_exit=code, SHOWN=shown, **ELEMENT)
    assert len(ended.requeues) == requeues
    (tmp_path / "off").mkdir()
    told = {**ELEMENT, "SHOWN": shown, "ELASTIC_RESUME_REQUEUE": "off"}
    assert submit(tmp_path / "off", script, "train.py", srun_exit=code, **told).requeues == []


@both
@pytest.mark.parametrize("code", [0, contract.EXIT_AT_FAULT, contract.EXIT_USAGE, 137, 143])
def test_no_other_code_requeues(tmp_path: Path, script: Path, code: int) -> None:
    """A job at fault would fail again, and a user's scancel (143) must not be undone."""
    ended = submit(tmp_path, script, "train.py", srun_exit=code, **ELEMENT)
    assert (ended.code, ended.requeues) == (code, [])


@both
def test_a_controller_that_is_away_is_asked_six_times(tmp_path: Path, script: Path) -> None:
    """Then the job ends with the code that says what to do."""
    ended = submit(tmp_path, script, "train.py", srun_exit=contract.EXIT_REQUEUE, requeue_exit=1, **ELEMENT)
    assert ended.code == contract.EXIT_REQUEUE
    assert len(ended.requeues) == 6


@both
def test_without_a_script_the_usage_is_told(tmp_path: Path, script: Path) -> None:
    """Before anything is started."""
    ended = submit(tmp_path, script, **ELEMENT)
    assert (ended.code, ended.srun) == (contract.EXIT_USAGE, [])
    assert "usage: sbatch" in ended.stderr


@both
def test_the_scripts_are_what_manifest_slurm_fills_in(script: Path) -> None:
    """Of an installed package the same can be had: `elastic-resume manifest slurm`."""
    assert script.read_text() == sbatch.fill(script.name, nodes=3)
