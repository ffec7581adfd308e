"""What `elastic-resume manifest slurm` prints; the scripts themselves are tested where Slurm runs them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from elastic_resume import cli, contract
from elastic_resume.cluster import sbatch

DEPLOY = Path(__file__).parents[1] / "deploy" / "slurm"
SRUN = """#!/bin/bash
while [[ $# -gt 0 && $1 != run ]]; do shift; done
[[ $# -eq 0 ]] || printf '%s\\n' "$@" > "$CALLED"
"""
WORDS = ["train.py", "--tag", "a b", "$HOME", "it's", "{{name}}", "-n", "line\\n"]


def rendered(*flags: str, command: list[str] | None = None) -> str:
    """What the command line prints."""
    words = ["manifest", "slurm", *flags, "--", *(command or WORDS)]
    return sbatch.render(cli._parser().parse_args(words))


@pytest.mark.parametrize("shape", sbatch.SHAPES)
def test_what_ships_is_the_template_without_a_command(shape: str) -> None:
    """It takes that, and more options, from sbatch's own command line."""
    name = sbatch.SHAPES[shape]
    assert (DEPLOY / name).read_text() == sbatch.fill(name, nodes=3)


@pytest.mark.parametrize("shape", sbatch.SHAPES)
def test_what_is_asked_of_slurm_stands_at_the_top(shape: str) -> None:
    """Before the first command, where sbatch stops reading."""
    flags = (
        "--nodes",
        "2:5",
        "--gpus",
        "8",
        "--memory",
        "200G",
        "--time",
        "2-00:00:00",
        "--partition",
        "gpu",
    )
    text = rendered("--shape", shape, *flags, "--name", "bert", "--cpus", "16")
    options = set(re.findall(r"^#SBATCH (\S+)$", text.split("\nset -", 1)[0], re.MULTILINE))
    size = {"allocation": {"--nodes=5", "--no-kill"}, "array": {"--array=0-4", "--nodes=1"}}[shape]
    told = {"--job-name=bert", "--gpus-per-node=8", "--mem=200G", "--time=2-00:00:00", "--partition=gpu"}
    assert options >= size | told | {"--cpus-per-task=16", "--requeue", "--open-mode=append"}


@pytest.mark.parametrize("shape", sbatch.SHAPES)
def test_words_reach_the_agent_as_they_are(tmp_path: Path, shape: str) -> None:
    """Run by bash, with a stand-in for srun; the number of nodes on which training goes on is among them."""
    script, called = tmp_path / "job.sbatch", tmp_path / "called"
    script.write_text(rendered("--shape", shape, "--nodes", "2:3"))
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLED": str(called),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURMD_NODENAME": "n0",
        "SLURM_CPUS_ON_NODE": "4",
        "SLURM_ARRAY_JOB_ID": "1",
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_JOB_NODELIST": "n0",
    }
    subprocess.run(["bash", str(script)], env=environ, check=True, timeout=60)
    own = ["--array-elements=nodes"] if shape == "array" else []
    assert called.read_text() == "\n".join(["run", *own, "--nnodes=2:3", *WORDS]) + "\n"


def test_what_is_not_asked_for_is_left_to_the_site() -> None:
    """No line for a partition, memory or GPUs; any number of nodes will do."""
    text = rendered("--nodes", "3")
    assert not re.search(r"--(mem|gpus-per-node|partition|nnodes)=", text.split("\n\nset -")[0])
    assert "set -- train.py" in text
    assert "#SBATCH --job-name=train\n" in text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nodes", "3:2"], "--nodes is '3:2'"),
        (["--memory", "200Gi"], "200G or 512M"),
        (["--time", "a day"], "--time"),
        (["--name", "my job"], "--name"),
        (["--partition", "-x"], "--partition"),
        (["--gpus", "many"], "--gpus"),
        (["--cpus", "0"], "--cpus"),
        (["--shape", "ring"], "--shape"),
    ],
)
def test_what_slurm_would_refuse_is_refused(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the flag, and nothing to submit."""
    code = cli.main(["manifest", "slurm", "--nodes", "3", *flags, "--", *WORDS])
    out, err = capsys.readouterr()
    assert (code, out) == (contract.EXIT_AT_FAULT, "")
    assert told in err
