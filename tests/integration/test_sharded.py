"""Models that are sharded over the ranks of each node: what a kill costs, what resumes, what is refused."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

import elastic_resume as er
from elastic_resume import cli
from elastic_resume.state import diff
from elastic_resume.testing import Cluster, chaos
from tests.support import launch_ranks
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "sharded.py"
FLAGS = ["--snapshot-every", "1", "--save-every", "1000"]
STEPS = 12
SOAK = "ELASTIC_RESUME_SOAK_KILLS" in os.environ
NODES = 3 if SOAK else 2
WORLD = 2 * NODES
CHAOS_S = float(os.environ.get("ELASTIC_RESUME_CHAOS_S", "600"))
SURVIVES = torch.__version__ >= "2.13"  # of sharded models
WAYS = [[], *([["--restartable"]] if SURVIVES else [])]
SOME_WAYS = [pytest.param([], marks=pytest.mark.soak if SURVIVES else ()), *WAYS[1:]]
# Of those in `sharded_kinds.py`. `make soak` takes all.
KINDS = ["AdamW", "one by one, tied", "mesh of two dimensions"]
# Name in the table of `sharded_kinds.py` -> a part of the error.
REFUSED = {
    "over nodes": r"it is sharded over the ranks \[0, 1, 2, 3\], and node n[01] has the ranks",
    "whole": r"run.replicate: no part of the model was given to fully_shard\(\)",
    "replicated late": r"run.replicate: the model was sharded after er.resume\(\)",
    "ignored": "run.replicate: the parameter head.bias is not sharded",
    "not replicated": r"each node trains a model of its own: call run.replicate\(model\)",
    "replicated twice": "run.replicate: .* over which FSDP replicates already",
    "step on rank 0": "no rank of rank 0's node has 'optimizer/state/0/exp_avg@1of2'",
    "other steps saved": r"run.save: other ranks do not save step [01]: each rank of a sharded model has to",
    "tensor parallelism": "Tensor, context and expert parallelism must have degree 1",
    "FSDP1": r"it is in FullyShardedDataParallel \(FSDP1\)",
    "ignored on an own mesh": r"call fully_shard\(\) on the whole model too, without ignored_params",
    "late": "UntrackableError: model/.*: it has been sharded after er.resume",
}


def train(directory: Path, nodes: int, min_nodes: int, plan: list[tuple[int, int, str]], *words: str) -> Path:
    """Train on nodes of two ranks; start each killed node again, once the others train if they may."""
    log = directory / "log"
    log.mkdir(parents=True)
    with Cluster(directory, nodes=nodes, min_nodes=min_nodes, workers_per_node=2, flags=FLAGS) as cluster:
        cluster.start(SCRIPT, "--losses", str(log), "--plan", json.dumps(plan), *words)
        for step, rank, who in plan:
            if who == "node":
                cluster.wait((log / f"done-{step}").exists, "the kill of a node")
                if nodes > min_nodes:
                    cluster.wait(step=step + 1)
                cluster.kill_node(rank // 2)
                cluster.start_node(rank // 2)
        codes = cluster.wait_exit(timeout_s=1800)
        assert set(codes) <= {0, -signal.SIGKILL}, cluster.output(0)
        assert cluster.lost_steps == 0
    return log


def check_same(log: Path, undisturbed: Path, step_count: int) -> None:
    """Check that each rank computed what it would have, and has the same state at its end."""
    whole = {step: next(iter(found.values())) for step, found in read_losses(undisturbed).items()}
    losses = read_losses(log)
    assert len(losses) == len(whole) == step_count
    for step, found in losses.items():  # a rank may die between a step and its record of it
        assert all(set(ranks) <= set(whole[step]) for ranks in found.values()), f"step {step}"
    ends = read_ends(log)
    assert len(ends) == WORLD
    assert ends == read_ends(undisturbed)
    assert len({json.dumps(end["whole"]) for end in ends.values()}) == 1


def read_losses(log: Path) -> dict[int, dict[tuple[int, int], list[float]]]:
    """Return, by step and by (generation, number of ranks), the losses of the ranks, in their order."""
    losses: dict[int, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(log.glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            losses[entry["step"]][entry["generation"], entry["world"]].append(entry["loss"])
    return losses


def read_ends(log: Path) -> dict[str, Any]:
    """Return what each rank has written at its end."""
    return {path.name: json.loads(path.read_text()) for path in log.glob("end*.json")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a run in which nothing dies."""
    return train(tmp_path_factory.mktemp("undisturbed"), NODES, NODES, [])


@pytest.mark.parametrize("words", SOME_WAYS)
def test_kills_change_nothing(undisturbed: Path, tmp_path: Path, words: list[str]) -> None:
    """A worker dies, then the rendezvous' host, in `make soak` after another node; both come back empty.

    Every rank computes what it would have. In a restartable function the others keep processes and shards.
    """
    node_kills = [(6, WORLD - 1, "node"), (9, 0, "node")] if SOAK else [(6, 0, "node")]
    plan = [(3, 3, "worker"), *node_kills]
    log = train(tmp_path, NODES, NODES, plan, *words)
    lines = [line for path in log.glob("rank*.jsonl") for line in path.read_text().splitlines()]
    assert len({json.loads(line)["pid"] for line in lines}) == (
        WORLD + 1 + 2 * len(node_kills) if words else WORLD * (1 + len(plan))
    )
    check_same(log, undisturbed, STEPS)
    assert all(max(map(len, found.values())) == WORLD for found in read_losses(log).values())


@pytest.mark.soak
@pytest.mark.parametrize("words", WAYS)
def test_random_faults_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Faults of all kinds for ELASTIC_RESUME_CHAOS_S seconds, on nodes of which none can be left out."""
    epochs = round(CHAOS_S / 3)  # of twelve steps, three to five a second
    words = ["--epochs", str(epochs), *words]
    undisturbed = train(tmp_path / "undisturbed", 3, 3, [], *words)
    monkeypatch.setenv("ELASTIC_RESUME_MAX_NO_PROGRESS", "30")  # faults may hit a start again and again
    log = tmp_path / "log"
    log.mkdir()
    flags = ["--nodes", "3", "--min-nodes", "3", "--workers-per-node", "2", "--seed", "9", *FLAGS[:2]]
    flags += ["--for", f"{CHAOS_S:.0f}s", "--dir", str(tmp_path / "run")]
    script = [str(SCRIPT), "--losses", str(log), *words, "--step-delay", "0.1"]
    code = chaos.main([*flags, "--", *script])
    output = capsys.readouterr().out
    print(output)
    assert code == 0, output
    check_same(log, undisturbed, STEPS * epochs)


@pytest.mark.soak  # test_end_to_end.py has the samples, `test_a_resume_divides_anew` the shards
@pytest.mark.parametrize("words", WAYS)
def test_other_numbers_of_nodes_keep_samples_and_losses(
    undisturbed: Path, tmp_path: Path, words: list[str]
) -> None:
    """The others go on without a node, until it comes back: the same global batches and mean losses."""
    plan = [(4, WORLD - 2, "node")]
    log = train(tmp_path, NODES, NODES - 1, plan, "--await-node", "8", *words)
    losses = read_losses(log)
    assert [max(losses[step])[1] for step in (4, 6, 8, 9, STEPS)] == [
        WORLD,
        WORLD - 2,
        WORLD - 2,
        WORLD,
        WORLD,
    ]
    whole = {step: next(iter(found.values())) for step, found in read_losses(undisturbed).items()}
    for step, found in losses.items():
        (generation, world), ranks = max(found.items())
        assert len(ranks) == world, f"step {step} of generation {generation}"
        assert math.isclose(sum(ranks) / world, sum(whole[step]) / WORLD, rel_tol=1e-6), f"step {step}"


@pytest.mark.soak  # the drained job below has no snapshots either
def test_checkpoints_without_snapshots(tmp_path: Path) -> None:
    """A commit waits for the next step, in which all ranks of the node take their part, or for late ranks."""
    (tmp_path / "log").mkdir()
    flags = ["--snapshot-every", "off", "--save-every", "5"]
    with Cluster(tmp_path, nodes=1, workers_per_node=2, flags=flags) as cluster:
        cluster.start(SCRIPT, "--losses", str(tmp_path / "log"), "--late", "--await-commit", "6")
        assert cluster.wait_exit() == [0], cluster.output(0)
        steps = [event["step"] for event in cluster.events("commit")]
        assert not cluster.events("snapshot-failed")
    assert steps[0] <= 6
    assert steps[-1] == STEPS


@pytest.mark.soak
@pytest.mark.parametrize("flags", [FLAGS, ["--snapshot-every", "off", "--save-every", "1000"]])
def test_a_drained_job_loses_no_step(tmp_path: Path, flags: list[str]) -> None:
    """All nodes are asked to end: they finish a step together, and the next start goes on from it."""
    (tmp_path / "log").mkdir()
    with Cluster(tmp_path, nodes=2, min_nodes=2, workers_per_node=2, flags=flags) as cluster:
        words = ["--losses", str(tmp_path / "log"), "--epochs", "3"]
        cluster.start(SCRIPT, *words)
        cluster.wait(step=5)
        for index in range(2):
            cluster.kill_agent(index, signal.SIGTERM)
        assert cluster.wait_exit() == [128 + signal.SIGTERM] * 2, cluster.output(0)
        cluster.start(SCRIPT, *words)
        assert cluster.wait_exit() == [0] * 2, cluster.output(0)
        assert cluster.lost_steps == 0


def test_a_checkpoint_of_shards_is_read_as_a_whole(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """er.load and export see whole tensors; for a damaged byte a tensor and its shard are named."""
    (end, *_) = read_ends(undisturbed).values()
    node = undisturbed.parent / "disks" / "n1" / "job" / "n1"
    state = er.load(node)
    assert {name: value.tolist() for name, value in state.items()} == end["whole"]
    optimizer = er.load(node, "optimizer")
    assert optimizer["state"][0]["exp_avg"].shape == state["0.weight"].shape
    newest = max(path for path in node.iterdir() if re.match(r"g\d+-s\d+", path.name))
    target = tmp_path / "model.pt"
    assert cli.main(["export", str(newest), str(target)]) == 0
    exported = torch.load(target, weights_only=True)
    assert all(torch.equal(exported[name], value) for name, value in state.items())
    copy = shutil.copytree(newest, tmp_path / "n1" / newest.name)
    file = copy / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert cli.main(["verify", "--deep", str(copy)]) != 0
    assert "(they hold model/0.weight@0of2 and " in " ".join(capsys.readouterr().out.split())


def test_a_resume_divides_anew(undisturbed: Path, tmp_path: Path) -> None:
    """Two shards become three, then whole tensors of DDP, which trains on, then two shards again."""
    shutil.copytree(undisturbed.parent / "disks" / "n1", tmp_path / "checkpoints")
    (end, *_) = read_ends(undisturbed).values()
    expected = end["whole"]
    for number, (ranks, words) in enumerate(
        [(3, []), (2, ["--ddp", "--epochs", "2"]), (2, ["--epochs", "2"])]
    ):
        log = tmp_path / str(number)
        log.mkdir()
        settings = {
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "ELASTIC_RESUME_NODE_NAME": "n1",
            "ELASTIC_RESUME_RUN_ID": "job",
            "ELASTIC_RESUME_CKPT_DIR": str(tmp_path / "checkpoints"),
        }
        env = [{**settings, "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        for done in launch_ranks.run_ranks(ranks, SCRIPT, "--losses", str(log), *words, env=env):
            assert done.returncode == 0, done.stderr
        ends = read_ends(log)
        assert len(ends) == ranks
        if "--ddp" in words:  # it has trained on
            assert ends["end0.json"]["whole"] != expected
            expected = ends["end0.json"]["whole"]
        assert all(found["whole"] == expected for found in ends.values()), words
    sharded, *_, whole = sorted((tmp_path / "checkpoints").rglob("g*-s*"))
    kinds = {difference.kind for difference in diff.compare(sharded, whole).differences}
    assert "values" in kinds
    assert "only in A" not in kinds, "diff sees shards"


@pytest.mark.soak
def test_save_by_one_rank_alone_ends_as_a_hang_and_costs_no_step(tmp_path: Path) -> None:
    """It waits for the others, who are in a collective of the next step. The report names the line."""
    with Cluster(tmp_path, nodes=1, workers_per_node=2, flags=[*FLAGS, "--hang-timeout", "4"]) as cluster:
        cluster.start(SCRIPT, "--losses", str(tmp_path), "--save-alone", "5")
        assert cluster.wait_exit() == [0]
        assert cluster.events("hang")[0]["step"] == 5
        assert "rank 0 waits in all_gather" in cluster.output(0)
        assert cluster.lost_steps == 0


def test_every_kind_of_sharded_model_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Two nodes of two ranks: each kind of `sharded_kinds.py` resumes; each of its misuses is an error.

    A kind that can stay in its process sees two worlds end, at another moment of a step on each rank.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_PORT": str(store.port),
        "LOCAL_WORLD_SIZE": "2",
    }
    env = [{**shared, "LOCAL_RANK": str(r % 2), "ELASTIC_RESUME_NODE_NAME": f"n{r // 2}"} for r in range(4)]
    names = [] if SOAK else [*KINDS, *REFUSED]
    ranks = launch_ranks.run_ranks(4, SCRIPTS / "sharded_kinds.py", str(tmp_path), *names, env=env)
    ended = launch_ranks.read_results(ranks)
    results = [rank["kinds"] for rank in ended]
    launch_ranks.check_kinds(results, 13 if SOAK else len(KINDS))
    for rank, kinds in enumerate(results):
        for kind, result in kinds.items():
            assert result["worlds"] == (2 if SURVIVES and "mesh" not in kind else 0), f"{kind}, rank {rank}"
            if kind in {"AdamW", "fused, kept whole", "compiled"}:
                assert result["overlaps"], f"{kind}, rank {rank}: copied while training waits"
            assert result["loaded"] is (True if rank % 2 == 0 else None), f"{kind}, rank {rank}"
        # FSDP's own averaging over nodes computes the same.
        for kind in {"mesh of two dimensions", "mesh of three dimensions"} & set(kinds):
            assert kinds[kind]["loss"] == pytest.approx(kinds["AdamW"]["loss"], rel=1e-5), kind
    for told in (rank["refused"] for rank in ended):
        assert set(told) == set(REFUSED)
        for name, expected in REFUSED.items():
            assert re.search(expected, told[name]), f"{name}: {told[name]}"
