"""What `prepare_launch` makes of flags, file, environment and scheduler. Nothing is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_resume import config
from elastic_resume.agent import torchelastic
from elastic_resume.schedulers import environment

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n0",
    "ELASTIC_RESUME_TOKEN": "x" * 20,
}


def prepare(*words: str) -> torchelastic.LaunchSpec:
    """Prepare the launch of a script with these flags, in the environment of the process."""
    args, given = config.parse_flags_and_file(torchelastic.build_parser(), [*words, "train.py"])
    here = environment.read_context(os.environ)
    with torchelastic.prepare_launch(args, given, "job", here) as spec:
        return spec


@pytest.fixture(autouse=True)
def in_slurm_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be one of two nodes of a Slurm step, in a directory with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for name in [name for name in os.environ if name.startswith(("SLURM", "PET_", "ELASTIC_RESUME"))]:
        monkeypatch.delenv(name)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("file", "variables", "words"),
    [
        ("", {}, []),
        ("standalone: false", {}, []),
        ("", {"PET_STANDALONE": "0"}, []),
        ("", {"PET_RDZV_ENDPOINT": ""}, []),
        ("", {}, ["--rdzv-endpoint="]),
    ],
)
def test_rendezvous_flag_without_value_leaves_the_scheduler_in_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, variables: dict[str, str], words: list[str]
) -> None:
    """Otherwise each node of the step would train alone."""
    (tmp_path / "c.yaml").write_text(file)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    spec = prepare("--config", "c.yaml", *words)
    assert (spec.config.min_nodes, spec.config.max_nodes) == (1, 2)


def test_several_workers_get_one_thread_each_without_a_banner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it torchrun prints four lines of warning."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    prepare("--nproc-per-node", "2")
    assert os.environ.pop("OMP_NUM_THREADS") == "1"
    assert "OMP_NUM_THREADS" not in caplog.text
    prepare("--nproc-per-node", "1")
    assert "OMP_NUM_THREADS" not in os.environ


def test_rdzv_conf_of_flag_keeps_other_keys_of_file(tmp_path: Path) -> None:
    """A timeout on the command line must not drop the file's token."""
    (tmp_path / "token").write_text("y" * 20)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "c.yaml").write_text("rdzv-conf: token_file=token,last_call_timeout=7s")
    spec = prepare("--config", "c.yaml", "--rdzv-conf", "last_call_timeout=9s")
    assert spec.rendezvous_config.last_call_timeout_s == 9
    assert spec.rendezvous_config.token == b"y" * 20
