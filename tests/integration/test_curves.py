"""A tracker gets each step once, with the undisturbed run's values, whatever dies and whenever.

`make soak` kills twenty times, `make test` three. ELASTIC_RESUME_SOAK_SEED chooses other moments.
"""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from elastic_resume.mechanisms.curves.exporters.wandb_file import StepReader
from elastic_resume.testing import Cluster
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "curves.py"
KILLS = int(os.environ.get("ELASTIC_RESUME_SOAK_KILLS", "3"))
SEED = int(os.environ.get("ELASTIC_RESUME_SOAK_SEED", "1"))
STEPS_PER_EPOCH, GAP = 20, 8
EPOCHS = 2 + KILLS * GAP // STEPS_PER_EPOCH
Values = dict[int, dict[str, float]]  # by step and key
COLUMNS = ("loss", "lr", "eval/loss")


def read_csv(path: Path) -> dict[int, tuple[str, ...]]:
    """Return each step's values; a step that is there twice fails."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    assert steps == list(range(1, len(steps) + 1))
    return {int(row["step"]): tuple(row[name] for name in COLUMNS) for row in rows}


def read_json_lines(path: Path) -> Values:
    """Return each step's values; the steps must ascend by one."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return {row["step"]: {key: row[key] for key in row.keys() - {"step", "time", "run"}} for row in rows}


def read_tensorboard(directory: Path) -> Values:
    """Return what TensorBoard's own reader finds; a value that is there twice fails."""
    from tensorboard.backend.event_processing import event_accumulator  # noqa: PLC0415 - takes seconds

    accumulator = event_accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return collect((tag, event.step, event.value) for tag in tags for event in accumulator.Scalars(tag))


def read_mlflow(directory: Path) -> Values:
    """Return what MLflow's client finds."""
    import mlflow  # noqa: PLC0415 - takes seconds

    client = mlflow.MlflowClient(f"file://{directory}")
    (run,) = client.search_runs(["0"], "tags.`elastic_resume.run_id` = 'job'")
    histories = (client.get_metric_history(run.info.run_id, key) for key in run.data.metrics)
    return collect((metric.key, metric.step, metric.value) for history in histories for metric in history)


def read_wandb(directory: Path) -> Values:
    """Return what W&B's files of all writers hold, as its own messages."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415 - takes seconds

    found = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for data in StepReader(path)._read_entries():
            history = Record.FromString(data).history
            for item in history.item:
                key = item.key or ".".join(item.nested_key)
                if not key.startswith("_"):
                    found.append((key, history.step.num, float(json.loads(item.value_json))))
    return collect(found)


def collect(found: Iterable[tuple[str, int, float]]) -> Values:
    """Return the values by step, each of which is there once."""
    values: Values = {}
    for key, step, value in found:
        assert key not in values.setdefault(step, {}), (key, step)
        values[step][key] = value
    return values


def train(
    directory: Path, *words: str, flags: tuple[str, ...] = (), nodes: int = 2, trackers: str = ""
) -> Cluster:
    """Start a job that logs to a file of its directory, and to other ``trackers``."""
    directory.mkdir()
    cluster = Cluster(
        directory,
        nodes=nodes,
        flags=["--log-metrics", f"csv:{directory / 'values.csv'}{trackers}", *flags],
        env={
            "ELASTIC_RESUME_MAX_NO_PROGRESS": "1000",
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(directory),
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        },
    )
    cluster.start(SCRIPT, *words)
    return cluster


def find_rank_0(cluster: Cluster) -> tuple[int, int, int] | None:
    """Return the newest generation, the node of rank 0 in it, and its step."""
    found = [
        (record.generation, index, record.step)
        for index, record in cluster.rank_progress()
        if record.worker.rank == 0 and record.step
    ]
    return max(found, default=None)


def kill_rank_0(cluster: Cluster, after: tuple[int, int], kind: str, rng: random.Random) -> int:
    """Kill its worker or its node a random moment after a step, in a later generation; return that one."""
    generation, step = after

    def found() -> tuple[int, int, int] | None:
        place = find_rank_0(cluster)
        return place if place is not None and place[0] > generation and place[2] >= step else None

    generation, node, _ = cluster.wait(found, f"step {step} of rank 0", 180)
    time.sleep(rng.uniform(0, 0.03))
    if kind == "worker":
        cluster.kill_worker(node)
    else:
        cluster.kill_node(node)
        cluster.start_node(node)
    return generation


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, ...]]:
    """Train without a failure; return the values of each step."""
    directory = tmp_path_factory.mktemp("undisturbed") / "job"
    with train(directory, "--epochs", str(EPOCHS), "--step-delay", "0") as cluster:
        assert cluster.wait_exit() == [0, 0]
    found = read_csv(directory / "values.csv")
    assert len(found) == EPOCHS * STEPS_PER_EPOCH
    assert all(values[0] and values[1] for values in found.values())
    assert [step for step, values in found.items() if values[2]] == list(
        range(STEPS_PER_EPOCH, len(found) + 1, STEPS_PER_EPOCH)
    )
    return found


SNAPSHOTS = {"": (), "-each-step": ("--snapshot-every", "1")}


@pytest.mark.parametrize(
    ("victim", "flags"),
    [
        pytest.param("any", ("--snapshot-every", "1"), id="any-each-step"),
        *(
            pytest.param(victim, flags, id=f"{victim}{name}", marks=pytest.mark.soak)
            for victim in ("worker", "node")
            for name, flags in SNAPSHOTS.items()
        ),
    ],
)
def test_kills_of_rank_0_leave_each_step_once_in_each_tracker(
    tmp_path: Path,
    undisturbed: dict[int, tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    victim: str,
    flags: tuple[str, ...],
) -> None:
    """Its worker, or its node with the agent that writes; the next kill follows a few steps later."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    rng = random.Random(SEED)
    directory = tmp_path / "job"
    trackers = f",jsonl:{directory / 'values.jsonl'},tensorboard:{directory / 'tb'}"
    trackers += f",mlflow:file://{directory / 'ml'},wandb:curves"
    flags = (*flags, "--save-every", "1000")
    trackers = "" if victim == "any" else trackers
    with train(directory, "--epochs", str(EPOCHS), flags=flags, trackers=trackers) as cluster:
        generation = 0
        for number in range(KILLS):
            kind = rng.choice(["worker", "node"]) if victim == "any" else victim
            after = (generation, GAP * number + rng.randrange(1, GAP))
            generation = kill_rank_0(cluster, after, kind, rng)
        assert cluster.wait_exit() == [0, 0]
        assert cluster.events("curves-lost") == []
        assert len(cluster.events("resume")) > KILLS
    assert read_csv(directory / "values.csv") == undisturbed
    if trackers:
        check_other_trackers(directory, undisturbed)


def check_other_trackers(directory: Path, undisturbed: dict[int, tuple[str, ...]]) -> None:
    """Compare what each tracker's own reader finds with the undisturbed run's values."""
    expected = {
        step: {key: float(value) for key, value in zip(COLUMNS, values, strict=True) if value}
        for step, values in undisturbed.items()
    }
    in_float32 = {
        step: {key: float(np.float32(value)) for key, value in values.items()}
        for step, values in expected.items()
    }
    assert without_recomputed(read_json_lines(directory / "values.jsonl")) == expected
    assert without_recomputed(read_mlflow(directory / "ml")) == expected
    assert without_recomputed(read_wandb(directory)) == expected
    assert without_recomputed(read_tensorboard(directory / "tb" / "job")) == in_float32


def without_recomputed(values: Values) -> Values:
    """Leave out what differs from the undisturbed run's by its meaning."""
    return {
        step: {key: value for key, value in each.items() if not key.endswith("recomputed")}
        for step, each in values.items()
    }


@pytest.mark.soak
def test_values_of_a_new_machine_and_of_a_new_job(tmp_path: Path) -> None:
    """Rank 0's machine is replaced while all are down, and later the job begins anew with the same file."""
    directory = tmp_path / "job"
    with train(directory, "--epochs", "2", flags=("--snapshot-every", "1")) as cluster:
        cluster.wait(lambda: (at := find_rank_0(cluster)) is not None and at[2] >= 8, "step 8", 60)
        found = find_rank_0(cluster)
        assert found is not None
        node = found[1]
        for index in range(2):
            cluster.kill_agent(index, signal.SIGTERM)
        cluster.wait_exit()
        cluster.wipe(node)
        for index in range(2):
            cluster.start_node(index)
        assert cluster.wait_exit() == [0, 0]
        before = (directory / "values.csv").read_bytes()
        assert len(read_csv(directory / "values.csv")) == 2 * STEPS_PER_EPOCH
        for index in range(2):
            cluster.start_node(index, flags=("--resume", "never"))
        assert cluster.wait_exit() == [0, 0]
    assert len(read_csv(directory / "values.csv")) == 2 * STEPS_PER_EPOCH
    assert (directory / "values.after-0.csv").read_bytes().splitlines()[1:] == before.splitlines()[1:]
