"""The worker library in real worlds of a few processes, each a node of its own, without any agent."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic_resume import constants, events
from elastic_resume.checkpoint.catalog import Catalog
from tests.support import launch_ranks
from tests.support.leak_reports import without_leaks
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

PROBE = SCRIPTS / "probe.py"
NEWER = '{"kind":"elastic_resume checkpoint","format":99}'


def environments(ckpt: Path, *nodes: str, **env: str) -> list[dict[str, str]]:
    """Return the environment of one rank on each of ``nodes``."""
    return [{"ELASTIC_RESUME_CKPT_DIR": str(ckpt), "ELASTIC_RESUME_NODE_NAME": node, **env} for node in nodes]


def probe(
    ckpt: Path, behaviour: str, steps: int = 6, nodes: Sequence[str] = ("n0", "n1"), **env: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run tests/support/scripts/probe.py with one rank on each of ``nodes``."""
    each = environments(ckpt, *nodes, **env)
    return launch_ranks.run_ranks(len(nodes), PROBE, behaviour, str(steps), env=each)


def assert_refused(ranks: Iterable[subprocess.CompletedProcess[str]], *texts: str) -> None:
    """Check that every rank ended with exit code 1 and an error with ``texts``, without a traceback."""
    for done in ranks:
        assert done.returncode == 1
        assert [text for text in texts if text not in done.stderr] == []
        assert "Traceback" not in done.stderr


MADE_ELSEWHERE = """
import json, os, sys
import torch
from torch import nn
import elastic_resume as er

rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model, ema = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), [torch.zeros(3)]
optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (rank + 1))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loads = rank == 0 and not sys.argv[1:]
if loads:  # the other node does not see the file
    found = torch.load("model.pt", weights_only=True)
    nn.modules.utils.consume_prefix_in_state_dict_if_present(found["state_dict"], "module.")
    for name, item in (("state_dict", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        item.load_state_dict(found[name])
    ema[0].fill_(5.0)
with er.resume(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema) as run:
    run.assert_ranks_equal()
    moments = [state["exp_avg"].tolist() for state in optimizer.state_dict()["state"].values()]
    values = [model.state_dict()["0.weight"].tolist(), moments, optimizer.param_groups[0]["lr"]]
    print(json.dumps([run.position.step, *values, scheduler.last_epoch, ema[0].tolist()]))
    if loads or not sys.argv[1:]:
        with torch.no_grad():
            model[0].weight.add_(1.0)
        run.step()
"""


def test_cold_start_broadcasts_state_that_rank_0_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments, rate, schedule and average come from a file that one node sees, at first."""
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({"state_dict": nn.DataParallel(model).state_dict(), **state}, "model.pt")
    Path("train.py").write_text(MADE_ELSEWHERE)
    first = launch_ranks.read_results(launch_ranks.run_ranks(2, "train.py"))
    moments = [kept["exp_avg"].tolist() for kept in optimizer.state_dict()["state"].values()]
    rate = optimizer.param_groups[0]["lr"]
    assert first == [[0, model.state_dict()["0.weight"].tolist(), moments, rate, 1, [5.0] * 3]] * 2
    again = launch_ranks.read_results(launch_ranks.run_ranks(2, "train.py", "again"))
    assert [result[0] for result in again] == [1, 1]
    assert again[0][2:] == first[0][2:]


def test_untrackable_object_on_one_rank_fails_all_ranks(tmp_path: Path) -> None:
    """Rank 0 must not wait for ever. unit/restore/test_coordinator.py has the other differences."""
    assert_refused(probe(tmp_path, "odd"), "odd", "builtin_function_or_method")


def test_resume_option_and_damage_decide_how_a_job_starts(tmp_path: Path) -> None:
    """The starts follow each other in one directory.

    1. With `must` and no checkpoint it is refused.
    2. After a crash it resumes, and ends with the weights of an undisturbed run.
    3. With other shapes it is refused; every difference is named, and no file changes.
    4. With `never` it starts over and moves the old checkpoints aside.
    5. With one manifest of a newer version it is refused on all nodes, and no file changes.
    """
    node = tmp_path / "parts" / "probe" / "n0"

    def list_names() -> list[str]:
        return sorted(entry.path.name for entry in Catalog(node, "probe").list_valid())

    refused = probe(tmp_path / "parts", "plain", ELASTIC_RESUME_RESUME="must")
    assert_refused(refused, "no node has a checkpoint")

    # All ranks die at step 5, the last checkpoint is of step 4.
    whole = launch_ranks.read_results(probe(tmp_path / "whole", "plain"))
    assert [done.returncode for done in probe(tmp_path / "parts", "die")] == [9, 9]
    ends = launch_ranks.read_results(probe(tmp_path / "parts", "plain"))
    assert [end["hooks"] for end in ends] == [[4], [4]]
    assert [end["weight"] for end in ends] == [end["weight"] for end in whole]
    assert [end["hooks"] for end in whole] == [[], []], "hooks are for starts from a checkpoint"

    # The message has every differing name with both shapes, on all ranks.
    before = sorted(path.name for path in node.iterdir())
    assert_refused(
        probe(tmp_path / "parts", "wider"),
        "model/0.weight: float32[9, 3] in the model, float32[5, 3] in the checkpoint",
        "model/1.running_mean: float32[9] in the model, float32[5] in the checkpoint",
    )
    assert sorted(path.name for path in node.iterdir()) == before

    kept = list_names()
    ends = launch_ranks.read_results(
        probe(tmp_path / "parts", "plain", steps=12, ELASTIC_RESUME_RESUME="never")
    )
    assert [end["hooks"] for end in ends] == [[], []]
    old = Catalog(tmp_path / "parts" / "probe.old-1" / "n0", "probe")
    assert sorted(entry.path.name for entry in old.list_valid()) == kept, "moved aside, not pruned"
    assert not set(kept) & set(list_names())
    assert ends[0]["generation"] > 2

    # The other node could read its own newest checkpoint. No node starts alone.
    newest = Catalog(node, "probe").list_valid()[0].path / constants.MANIFEST_FILE
    newest.write_text(NEWER)
    before = sorted(path.name for path in (tmp_path / "parts").rglob("*"))
    refused = probe(tmp_path / "parts", "plain", steps=14)
    assert_refused(refused, "Upgrade elastic_resume on every node")
    lines = [[line for line in done.stderr.splitlines() if "elastic_resume" in line] for done in refused]
    assert max(map(len, lines)) <= 2
    assert sorted(path.name for path in (tmp_path / "parts").rglob("*")) == before
    assert newest.read_text() == NEWER


def test_resume_refuses_diverged_replicas_and_names_tensor(tmp_path: Path) -> None:
    """One rank's weights drift; the next resume names the tensor and the ranks."""
    assert [done.returncode for done in probe(tmp_path, "diverge", ELASTIC_RESUME_CHECK_REPLICAS="off")] == [
        0,
        0,
    ]
    assert_refused(probe(tmp_path, "plain", steps=9), "'model/0.weight'", "rank 0 against rank 1")


def test_resume_on_shared_file_system_reads_other_nodes_checkpoints(tmp_path: Path) -> None:
    """A requeued job may run on other machines. All ranks have the buffers of rank 0, as under DDP."""
    first = launch_ranks.read_results(probe(tmp_path, "plain", nodes=("old0", "old1")))
    again = launch_ranks.read_results(probe(tmp_path, "plain", nodes=("new0", "new1")))
    assert [end["weight"] for end in again] == [end["weight"] for end in first]
    assert [end["mean"] for end in [*first, *again]] == [first[0]["mean"]] * 4
    assert Catalog(tmp_path / "probe" / "new1", "probe").list_valid(read_data=True)


def test_node_with_two_ranks_receives_lost_checkpoint_once(tmp_path: Path) -> None:
    """Three ranks, n1 has two: one receives and commits, the other loads from its slot."""
    first = launch_ranks.read_results(probe(tmp_path, "plain", 4, nodes=("n0", "n1", "n1")))
    shutil.rmtree(tmp_path / "probe" / "n1")
    again = launch_ranks.read_results(probe(tmp_path, "plain", 4, nodes=("n0", "n1", "n1")))
    assert [end["weight"] for end in again] == [end["weight"] for end in first]
    resumed = [e for e in events.read_run(tmp_path / "probe") if e["event"] == "resume"][-1]
    assert (resumed["receiving_nodes"], resumed["source_node"]) == (["n1"], "n0")
    assert Catalog(tmp_path / "probe" / "n1", "probe").list_valid(read_data=True)
    assert {e["rank"] for e in events.read_run(tmp_path / "probe") if e["event"] == "commit"} == {0, 1}


def test_failing_disk_costs_checkpoints_and_not_training(tmp_path: Path) -> None:
    """For four steps nothing large can be written; the next save works."""
    (done,) = probe(tmp_path, "full-disk", steps=10, nodes=["n0"], EVERY="1000")
    assert launch_ranks.read_results([done])[0]["step"] == 10
    assert "was not saved" in done.stderr
    assert "Training continues" in done.stderr
    kinds = [(e["event"], e["step"]) for e in events.read_run(tmp_path / "probe") if "commit" in e["event"]]
    refused = [("commit-failed", 4), ("commit-failed", 6)]
    # The last step is saved by the script, and again when its epoch is over.
    assert kinds == [("commit", 2), *refused, ("commit", 8), ("commit", 10), ("commit", 10)]
    entries = Catalog(tmp_path / "probe" / "n0", "probe").list_valid(read_data=True)
    assert [entry.step for entry in entries] == [10, 8, 2]


def test_unwritable_directory_fails_before_first_step(tmp_path: Path) -> None:
    """A file has the directory's name: one line, exit code 1, on every rank."""
    (tmp_path / "probe").write_text("not a directory")
    assert_refused(probe(tmp_path, "plain"), str(tmp_path / "probe"))


def test_two_hosts_with_same_node_name_are_refused(tmp_path: Path) -> None:
    """Each has its own disk, so no lock sees both; nothing is quarantined."""
    each = environments(tmp_path / "0", "ubuntu") + environments(tmp_path / "1", "ubuntu")
    assert_refused(launch_ranks.run_ranks(2, PROBE, "plain", "3", env=each), "ELASTIC_RESUME_NODE_NAME")


def test_wrong_argument_is_one_line_and_deterministic_failure_event(tmp_path: Path) -> None:
    """The agent reads the event and does not restart."""
    log = tmp_path / "events.jsonl"
    (done,) = probe(
        tmp_path, "plain", nodes=["n0"], ELASTIC_RESUME_KEEP="1", ELASTIC_RESUME_EVENTS_PATH=str(log)
    )
    assert done.returncode == 1
    assert len(without_leaks(done.stderr).splitlines()) == 1
    failure = next(events.read(log))
    assert (failure["event"], failure["deterministic"], failure["type"]) == ("failure", True, "ConfigError")
