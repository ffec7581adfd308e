"""The recipes of docs/guides/curves.md and the trackers of ``--log-metrics``, in a job whose rank 0 dies.

Both must have each step once, with equal values.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic_resume.mechanisms.curves.exporters.wandb_file import StepReader
from elastic_resume.testing import Cluster
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

IS_SOAK = "ELASTIC_RESUME_SOAK_KILLS" in os.environ
STEPS = 90 if IS_SOAK else 20
KILLS = range(7, 87, 4) if IS_SOAK else (7, 8)


def _read_tensorboard(directory: Path) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars("loss")]


def _read_mlflow(directory: Path, query: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient  # noqa: PLC0415  collecting tests takes seconds longer with it

    client = MlflowClient(f"file://{directory}")
    (run,) = client.search_runs(["0"], query)
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]


def _read_wandb(directory: Path) -> list[tuple[int, float]]:
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415  the same

    found = []
    for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for record in map(Record.FromString, StepReader(file)._read_entries()):
            if record.WhichOneof("record_type") == "history":
                items = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
                found.append((record.history.step.num, json.loads(items["loss"])))
    return found


def _read_csv(path: Path) -> list[tuple[int, float]]:
    rows = [line.split(",") for line in path.read_text().splitlines()]
    return [(int(step), float(loss)) for step, loss in rows]


@pytest.mark.soak
def test_each_logger_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is killed between the log and the end of a step, where recipes are most likely to fail."""
    env = {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "ELASTIC_RESUME_MAX_NO_PROGRESS": "1000",
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    own = tmp_path / "own"
    own.mkdir()
    trackers = f"tensorboard:{tmp_path}/runs,wandb,mlflow:file://{tmp_path}/mlruns"
    with Cluster(tmp_path / "job", nodes=1, flags=["--log-metrics", trackers], env=env) as cluster:
        cluster.start(SCRIPTS / "own_loggers.py", str(own), str(STEPS), *map(str, KILLS))
        assert cluster.wait_exit() == [0]
    steps = list(range(1, STEPS + 1))
    expected = _read_csv(own / "loss.csv")
    assert [step for step, _ in expected] == steps
    assert _read_tensorboard(own / "tensorboard") == expected
    assert _read_mlflow(own / "mlruns", "tags.job = 'digits'") == expected
    (run_directory,) = (tmp_path / "runs").iterdir()
    assert _read_tensorboard(run_directory) == expected
    assert _read_wandb(tmp_path) == expected
    assert _read_mlflow(tmp_path / "mlruns", "") == expected
    assert sorted([*steps, *KILLS]) == sorted(step for step, _ in _read_csv(own / "not-recomputed.csv"))
