"""Write points to an MLflow run, which is found again by a tag with the job's run id.

MLflow keeps each value that it is sent, also twice. So `open` reads the history of each metric, and values
that are there are not sent again. MLflow can remove no value: when the job goes back, a new run gets a copy
of the values up to that step, and the old one stays as it is, under another tag.

A file store is written value by value, in the order of a batch, and a kill can leave a part of the last step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from elastic_resume.mechanisms.curves.exporter import Exporter, Point

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

TAG = "elastic_resume.run_id"
_ABANDONED_TAG = "elastic_resume.abandoned_run_id"
_BATCH = 1000
"""The most metrics that MLflow takes in one request."""
_DEFAULT_EXPERIMENT_ID = "0"
_BAD_CHARACTERS = re.compile(r"[^\w.\- :/]")


class MlflowRun(Exporter):
    """Writes to the run of the job in the experiment that MLflow's own variables name."""

    def __init__(self, uri: str, run_id: str) -> None:
        self._uri = uri
        self._run_id = run_id
        self._client: MlflowClient | None = None
        self._mlflow_id = ""
        self._last_steps: dict[str, int] = {}
        """The last step of each metric that was there at `open`."""
        self._last_step = -1

    def open(self, last_written: int, go_back_to: int | None = None) -> int:
        """Find or make the run, and return the last step before the newest, which may be incomplete."""
        del last_written  # the history tells more
        self.close()
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra

        client = MlflowClient(self._uri or None)
        experiment_id = _find_experiment(client)
        name = self._run_id.replace("'", "")
        found = client.search_runs(
            [experiment_id], f"tags.`{TAG}` = '{name}'", max_results=1, order_by=["start_time DESC"]
        )
        run = found[0] if found else client.create_run(experiment_id, tags={TAG: name}, run_name=name)
        metrics = list(_read_history(client, run))
        if go_back_to is not None and any(metric.step > go_back_to for metric in metrics):
            metrics = [metric for metric in metrics if metric.step <= go_back_to]
            run = self._start_over(client, run, metrics)
        self._client, self._mlflow_id = client, run.info.run_id
        client.update_run(self._mlflow_id, status="RUNNING")
        self._last_steps = {metric.key: metric.step for metric in metrics}
        self._last_step = max(self._last_steps.values(), default=0) - 1
        return self._last_step

    def _start_over(self, client: MlflowClient, old: Run, metrics: Sequence[Metric]) -> Run:
        """Return a new run with these metrics. It gets the tag last; the newest run with the tag counts."""
        name = self._run_id
        new = client.create_run(old.info.experiment_id, run_name=name, tags={_ABANDONED_TAG: name})
        _log(client, new.info.run_id, sorted(metrics, key=lambda metric: metric.step))
        client.set_tag(new.info.run_id, TAG, name)
        client.delete_tag(new.info.run_id, _ABANDONED_TAG)
        client.set_tag(old.info.run_id, _ABANDONED_TAG, name)
        client.delete_tag(old.info.run_id, TAG)
        client.set_terminated(old.info.run_id, "KILLED")
        return new

    def write(self, points: Sequence[Point]) -> None:
        """Send the values of points that are not there."""
        from mlflow.entities import Metric  # noqa: PLC0415 - an extra

        if self._client is None:
            raise ValueError("the exporter is closed")
        metrics = [
            Metric(name, value, int(point.time * 1000), point.step)
            for point in points
            for name, value in ((_BAD_CHARACTERS.sub("_", key), value) for key, value in point.values.items())
            if point.step > self._last_steps.get(name, -1)
        ]
        _log(self._client, self._mlflow_id, metrics)
        if points:
            self._last_step = points[-1].step

    def flush(self) -> int:
        """Return the last step: MLflow has stored it when `write` returns."""
        return self._last_step

    def close(self) -> None:
        """Mark the run as finished; the next writer marks it as running again."""
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self._mlflow_id)


def _find_experiment(client: MlflowClient) -> str:
    """Return the id of the experiment that the environment names, as for MLflow's own functions."""
    if experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return experiment_id
    if not (name := os.environ.get("MLFLOW_EXPERIMENT_NAME")):
        return _DEFAULT_EXPERIMENT_ID
    if (experiment := client.get_experiment_by_name(name)) is not None:
        return str(experiment.experiment_id)
    return str(client.create_experiment(name))


def _read_history(client: MlflowClient, run: Run) -> Iterable[Metric]:
    """Return all values of a run; those of each metric by step."""
    for key in client.get_run(run.info.run_id).data.metrics:
        yield from sorted(client.get_metric_history(run.info.run_id, key), key=lambda metric: metric.step)


def _log(client: MlflowClient, run_id: str, metrics: Sequence[Metric]) -> None:
    for start in range(0, len(metrics), _BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + _BATCH], synchronous=True)
