"""Three ported scripts end with the same state after a kill as without."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.testing import Fault, assert_same_run, equivalence
from tests.support import launch_ranks
from tests.support.paths import ROOT

PORTS = ROOT / "examples" / "ports"


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.soak  # test_no_step_lost.py compares weights after kills, test_state_kinds.py has each state
@pytest.mark.parametrize(
    ("name", "nodes", "fault"),
    [
        ("toy", 1, Fault("kill-worker", rank=0, step=20)),
        # Not rank 0: if its last copy is lost, BatchNorm's buffers are one update older.
        ("imagenet", 1, Fault("kill-worker", rank=1, step=20)),
        ("ema", 2, Fault("kill-node", node=1, step=20)),
    ],
)
def test_killed_port_ends_with_state_of_undisturbed_run(
    name: str, nodes: int, fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, optimizer, scheduler, average, best accuracy, and the output of each epoch or step."""
    monkeypatch.chdir(tmp_path)
    if name == "toy":
        monkeypatch.setattr(equivalence, "POLL_S", 1.2)  # longer than the whole script
    script = PORTS / f"{name}.py"
    assert_same_run(
        script, faults=[fault], nodes=nodes, workers_per_node=2 // nodes, lines=r"^(step|epoch) \d"
    )


@pytest.mark.cluster
def test_port_continues_from_file_of_original_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All originals and ports train. The port of the classifier starts from the file of a DDP model."""
    monkeypatch.chdir(tmp_path)
    for name, *words in (("toy", "--steps", "20"), ("imagenet", "--epochs", "1"), ("ema", "--epochs", "1")):
        done = launch_ranks.run_ranks(1, PORTS / f"{name}_before.py", *words)[0]
        assert done.returncode == 0, done.stderr
    for file in ("toy.checkpoint", "checkpoint.pth.tar", "last.pt"):
        assert (tmp_path / file).exists()
    resumed = ("imagenet", "--epochs", "2", "--resume", "checkpoint.pth.tar")
    for name, *words in (("toy", "--steps", "20"), ("ema", "--epochs", "1"), resumed):
        ported = launch_ranks.run_ranks(2, PORTS / f"{name}.py", *words)
        assert [done.returncode for done in ported] == [0, 0], ported[0].stderr
    lines = ported[0].stdout.splitlines()
    assert lines[0] == "=> loaded checkpoint 'checkpoint.pth.tar' (epoch 1)"
    assert lines[1].startswith("epoch [2][0/")
    assert lines[-1].startswith("epoch 2: ")
