from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.mechanisms.curves.exporter import Exporter, Point, parse_exporter
from tests.support.killed_writers import assert_equal_points, write_with_kills

pytestmark = pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")

ENV = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)


def _open(directory: Path, go_back_to: int | None = None) -> tuple[Exporter, int]:
    exporter = parse_exporter("--log-metrics", f"mlflow:file://{directory}/mlruns")("job-1")
    return exporter, exporter.open(-1, go_back_to)


def _make_client(uri: str) -> Any:
    from mlflow import MlflowClient  # noqa: PLC0415  collecting tests takes seconds longer with it

    return MlflowClient(uri)


def _read(directory: Path, tag: str = "elastic_resume.run_id") -> dict[int, dict[str, float]]:
    client = _make_client(f"file://{directory}/mlruns")
    (run,) = client.search_runs(["0"], f"tags.`{tag}` = 'job-1'")
    found: dict[int, dict[str, float]] = {}
    for key in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, key):
            values = found.setdefault(metric.step, {})
            assert key not in values
            values[key] = metric.value
    return found


@pytest.mark.slow
def test_kills_leave_each_step_once(tmp_path: Path) -> None:
    """MLflow's client finds one value per step and metric, whatever the killed writers had written."""
    write_with_kills(f"mlflow:file://{tmp_path}/mlruns", tmp_path, 100, modules=("mlflow",), env=ENV)
    assert_equal_points(_read(tmp_path), 100)


def test_step_that_a_kill_has_cut_is_completed(tmp_path: Path) -> None:
    """A file store has a file per metric, and the kill came between two."""
    exporter, last = _open(tmp_path)
    assert last == -1
    exporter.write([Point(step, 1.0, {"a": step, "b": step}) for step in range(3)])
    exporter.close()
    (file,) = (tmp_path / "mlruns").glob("0/*/metrics/b")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    exporter, last = _open(tmp_path)
    assert last == 1
    exporter.write([Point(step, 1.0, {"a": step, "b": step}) for step in range(2, 4)])
    assert exporter.flush() == 3
    exporter.close()
    assert _read(tmp_path) == {step: {"a": step, "b": step} for step in range(4)}


def test_more_values_than_one_request_takes(tmp_path: Path) -> None:
    """MLflow refuses more than 1000 in a batch."""
    exporter, _ = _open(tmp_path)
    exporter.write([Point(step, 1.0, {f"m{n}": n for n in range(30)}) for step in range(40)])
    exporter.close()
    assert len(_read(tmp_path)) == 40


def test_values_and_names_that_mlflow_does_not_take(tmp_path: Path) -> None:
    """Both nan and inf are kept; characters that MLflow refuses become underscores."""
    exporter, _ = _open(tmp_path)
    exporter.write([Point(0, 1.0, {"a[0], b": math.inf, "train/ä-c.d": math.nan, "e": True})])
    exporter.close()
    values = _read(tmp_path)[0]
    assert math.isnan(values.pop("train/ä-c.d"))
    assert values == {"a_0__ b": math.inf, "e": 1.0}


def test_going_back_begins_a_new_run_with_the_steps_before(tmp_path: Path) -> None:
    """The old run stays as it is, and is found by another tag."""
    exporter, _ = _open(tmp_path)
    exporter.write([Point(step, 1.0, {"a": step}) for step in range(6)])
    exporter.close()
    exporter, last = _open(tmp_path, go_back_to=2)
    assert last == 1  # the newest step may be incomplete
    exporter.write([Point(step, 1.0, {"a": -step}) for step in range(2, 5)])
    exporter.close()
    assert {step: values["a"] for step, values in _read(tmp_path).items()} == {0: 0, 1: 1, 2: 2, 3: -3, 4: -4}
    assert len(_read(tmp_path, "elastic_resume.abandoned_run_id")) == 6
    exporter, last = _open(tmp_path)
    assert last == 3
    exporter.close()


def test_experiment_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is where MLflow's own functions would make it, each time."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
    for step in range(2):
        exporter, _ = _open(tmp_path)
        exporter.write([Point(step, 1.0, {"a": 1.0})])
        exporter.close()
    client = _make_client(f"file://{tmp_path}/mlruns")
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "a")] == [0, 1]
    assert run.info.status == "FINISHED"


def test_run_is_running_while_it_is_written(tmp_path: Path) -> None:
    """Also after an earlier writer has ended."""
    for _ in range(2):
        exporter, _ = _open(tmp_path)
        client = _make_client(f"file://{tmp_path}/mlruns")
        (run,) = client.search_runs(["0"])
        assert run.info.status == "RUNNING"
        exporter.close()
        exporter.close()
