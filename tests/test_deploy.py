"""What ships under deploy/, as far as it takes no cluster; for Kubernetes see test_manifest.py.

The Slurm script runs for real, with stand-ins for `srun` and `scontrol` that note how they were called.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from elastic_resume import config, contract

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SBATCH = DEPLOY / "slurm" / "train.sbatch"


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


def test_the_agent_is_process_1_of_the_container() -> None:
    """A shell in its place would swallow SIGTERM."""
    assert 'ENTRYPOINT ["elastic-resume", "run"]' in (DEPLOY / "Dockerfile").read_text()


# ---- Slurm -------------------------------------------------------------------------------------------

STAND_IN = """#!/bin/bash
printf '%s\\n' "$@" '' >> "$CALLS/$(basename "$0")"
case "$(basename "$0") $1" in
  "srun "*) exit "$SRUN_EXIT" ;;
  "scontrol show") printf '%s\\n' $NODES ;;
  "scontrol requeue") exit "$REQUEUE_EXIT" ;;
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
    def agent(self) -> argparse.Namespace:
        """The flags of `elastic-resume run`."""
        (words,) = self.srun
        return flags(words[words.index("run") + 1 :])


def submit(tmp_path: Path, *words: str, srun_exit: int = 0, requeue_exit: int = 0, **variables: str) -> Ended:
    """Run the batch script in the environment that Slurm would give it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "USER": "ada",
        "CALLS": str(tmp_path),
        "NODES": "n7 n8 n9",
        "SRUN_EXIT": str(srun_exit),
        "REQUEUE_EXIT": str(requeue_exit),
        "REQUEUE_RETRY_S": "0",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "n[7-9]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_CPUS_PER_TASK": "4",
        **variables,
    }
    command = ["bash", str(SBATCH), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return Ended(done.returncode, done.stderr, calls(tmp_path / "srun"), calls(tmp_path / "scontrol"))


def calls(path: Path) -> list[list[str]]:
    """Read what a stand-in noted: words by line, calls divided by an empty line."""
    text = path.read_text() if path.exists() else ""
    return [call.split("\n") for call in text.split("\n\n") if call]


def test_bash_reads_the_batch_script() -> None:
    """`bash -n`: no syntax error in a branch that is rarely taken."""
    subprocess.run(["bash", "-n", str(SBATCH)], check=True, timeout=60)


def test_sbatch_sees_the_options_that_a_flaky_cluster_needs() -> None:
    """They stand before the first command, where sbatch stops reading."""
    head = SBATCH.read_text().split("\nset -euo")[0]
    options = set(re.findall(r"^#SBATCH (\S+)$", head, re.MULTILINE))
    assert {"--requeue", "--open-mode=append", "--no-kill", "--ntasks-per-node=1"} <= options


def test_srun_starts_one_agent_per_node_that_meet_at_the_first_ones(tmp_path: Path) -> None:
    """Endpoints from the node list, port from the job id, the script and its arguments unchanged."""
    ended = submit(tmp_path, "train.py", "--lr", "0.1 0.2")
    assert ended.code == 0
    words = ended.srun[0]
    assert {"--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(words)
    agent = ended.agent
    assert agent.nnodes == "1:3"
    assert agent.rdzv_endpoint == "n7:24567,n8:24567,n9:24567"
    assert agent.rdzv_id == "slurm-1234567"
    assert agent.node_name is None
    assert Path(agent.ckpt_dir).is_absolute()
    assert (agent.training_script, agent.training_script_args) == ("train.py", ["--lr", "0.1 0.2"])


def test_an_array_element_has_a_name_of_its_own(tmp_path: Path) -> None:
    """Its job id may be the whole array's: requeueing that takes the siblings along."""
    ended = submit(
        tmp_path,
        "train.py",
        srun_exit=contract.EXIT_REQUEUE,
        SLURM_ARRAY_JOB_ID="1234567",
        SLURM_ARRAY_TASK_ID="2",
    )
    assert ended.agent.rdzv_id == "slurm-1234567_2"
    assert ended.scontrol[-1] == ["requeue", "1234567_2"]


@pytest.mark.parametrize("code", [0, contract.EXIT_AT_FAULT, contract.EXIT_USAGE, 137, 143])
def test_only_the_code_that_asks_for_it_requeues(tmp_path: Path, code: int) -> None:
    """A job at fault would fail again, and a user's scancel (143) must not be undone."""
    ended = submit(tmp_path, "train.py", srun_exit=code)
    assert ended.code == code
    assert [call[0] for call in ended.scontrol] == ["show"]


def test_requeueing_has_an_end(tmp_path: Path) -> None:
    """The first life has no SLURM_RESTART_COUNT; the last has MAX_REQUEUES."""
    ended = submit(
        tmp_path, "train.py", srun_exit=contract.EXIT_REQUEUE, SLURM_RESTART_COUNT="3", MAX_REQUEUES="3"
    )
    assert ended.code == contract.EXIT_REQUEUE
    assert [call[0] for call in ended.scontrol] == ["show"]
    assert "not again" in ended.stderr


def test_a_controller_that_is_away_is_asked_five_times(tmp_path: Path) -> None:
    """Then the job ends with the code that says what to do, and a line that says it in words."""
    ended = submit(tmp_path, "train.py", srun_exit=contract.EXIT_REQUEUE, requeue_exit=1)
    assert ended.code == contract.EXIT_REQUEUE
    assert [call[0] for call in ended.scontrol] == ["show"] + ["requeue"] * 5
    assert "requeue it by hand" in ended.stderr


def test_without_a_node_list_no_agent_starts(tmp_path: Path) -> None:
    """On localhost each node would train alone."""
    ended = submit(tmp_path, "train.py", NODES="")
    assert (ended.code, ended.srun) == (1, [])
    assert "n[7-9]" in ended.stderr


def test_a_long_node_list_is_read_to_its_end(tmp_path: Path) -> None:
    """`scontrol | head -n 1` dies of SIGPIPE now and then, and with it the job, under pipefail."""
    ended = submit(tmp_path, "train.py", NODES=" ".join(f"node{number:05}" for number in range(9_000)))
    assert (ended.code, ended.agent.rdzv_endpoint.partition(",")[0]) == (0, "node00000:24567")


def test_without_a_script_the_usage_is_told(tmp_path: Path) -> None:
    """Before anything is started."""
    ended = submit(tmp_path)
    assert (ended.code, ended.srun) == (contract.EXIT_USAGE, [])
