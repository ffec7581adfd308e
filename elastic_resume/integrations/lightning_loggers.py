"""Let Lightning's loggers continue in their version after a restart, with each row and point once.

A CSVLogger or TensorBoardLogger without ``version=`` takes the next free number in each process, and
Lightning makes it before the state is restored. So each node notes the versions in its directory. A
CSVLogger also deletes the ``metrics.csv`` that it finds: that file is kept aside until the state is restored,
and then gets the rows back that were written before this state.
"""

from __future__ import annotations

import csv
import functools
import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_resume import constants
from elastic_resume.checkpoint.atomic_io import translate_os_errors
from elastic_resume.config import Settings
from elastic_resume.data.batch_size import read_rank_and_world_size
from elastic_resume.data.rank_values import RankState
from elastic_resume.integrations import set_known
from elastic_resume.training.run import Run

logger = logging.getLogger(__name__)

KEPT = ".elastic_resume"  # suffix of a metrics.csv whose rows go back
_PLACE = ("ckpt_dir", "run_id", "node_name")


class Loggers(RankState):
    """The CSVLoggers and TensorBoardLoggers of one Trainer. Only rank 0 writes."""

    def __init__(self, trainer: Any, library: Any, resume_options: Mapping[str, Any]) -> None:
        """Give them the versions of an earlier start of this run. Called on all ranks, before they log."""
        super().__init__()
        csv_class, board_class = library.loggers.CSVLogger, library.loggers.TensorBoardLogger
        self._csv = [item for item in trainer.loggers if isinstance(item, csv_class)]
        self._boards = [item for item in trainer.loggers if isinstance(item, board_class)]
        self._trainer, self._library = trainer, library
        self._writers: list[Any] = []  # of CSV files, on rank 0
        self._rows_written: list[int] = []
        place = {name: resume_options[name] for name in _PLACE if name in resume_options}
        settings = Settings.for_worker(os.environ, sys.argv[0], **place)
        node_dir = settings.ckpt_dir / settings.run_id / settings.node_name
        self._file = node_dir / constants.LOGGER_VERSIONS_FILE
        self._unnumbered = [one for one in (*self._csv, *self._boards) if one._version is None]  # noqa: SLF001
        is_new = resume_options.get("resume") == "never"
        self._set_versions([] if is_new else self._read_noted())
        if read_rank_and_world_size()[0] == 0:
            for one in self._csv:
                self._open(one)

    def note_versions(self, run: Run) -> None:
        """Note the versions for the next start. Called on all ranks, after `er.resume`."""
        context, is_first = run._context, run.rank == 0  # noqa: SLF001  not for scripts
        own = [one.version if is_first else None for one in self._unnumbered]
        versions = context.collectives.gather(own)[0]
        if context.is_local_leader and versions != self._read_noted():
            with translate_os_errors("write", self._file):
                self._file.write_text(json.dumps(versions))
        if run.plan.kind != "resumed":  # Lightning would have deleted them
            for writer in self._writers:
                _kept_file(writer).unlink(missing_ok=True)
        elif is_first:
            for board in self._boards:
                self._purge(board, self._trainer.fit_loop.epoch_loop._batches_that_stepped)  # noqa: SLF001

    def close(self) -> None:
        """Do nothing more; the Trainer may log an evaluation."""

    # ---- at each step boundary -------------------------------------------------------------------------

    def read_own(self) -> list[int]:
        """Write what was logged; return the number of rows in each CSV file."""
        for writer in self._writers:
            writer.save()
        return list(self._rows_written)

    def load_rows(self, rows: list[Any]) -> None:
        """Give each CSV file the rows that were written before the restored state."""
        for index, (writer, count) in enumerate(zip(self._writers, rows[0], strict=False)):
            self._rows_written[index] = _restore_rows(writer, count)

    # ---- internals -------------------------------------------------------------------------------------

    def _read_noted(self) -> list[Any]:
        try:
            noted = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return []
        is_for_these = isinstance(noted, list) and len(noted) == len(self._unnumbered)
        return noted if is_for_these else []

    def _set_versions(self, noted: list[Any]) -> None:
        """Take the versions that any node has noted: rank 0's may be new."""
        numbers = [one if type(one) is int else -1 for one in noted] or [-1] * len(self._unnumbered)
        known = torch.tensor([int(bool(noted)), *numbers], device=self._trainer.strategy.root_device)
        if dist.is_initialized():
            dist.all_reduce(known, dist.ReduceOp.MAX)
        has_started, *numbers = known.tolist()
        for one, number in zip(self._unnumbered, numbers, strict=True):
            if number >= 0:
                set_known(one, "_version", number)
        cli: Any = sys.modules.get(f"{self._library.__name__}.cli")
        for callback in self._trainer.callbacks if has_started and cli is not None else ():
            if isinstance(callback, cli.SaveConfigCallback):
                set_known(callback, "overwrite", True)  # it refuses the file of this run's first start

    def _open(self, one: Any) -> None:
        """Open a CSV file before Lightning does, and keep the rows that are there."""
        metrics = Path(one.log_dir) / "metrics.csv"
        if metrics.exists():
            metrics.replace(metrics.with_name(metrics.name + KEPT))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Experiment logs directory")
            writer = one.experiment
        index, save = len(self._writers), writer.save
        self._writers.append(writer)
        self._rows_written.append(0)

        def counted() -> None:
            self._rows_written[index] += len(writer.metrics)
            save()

        writer.save = functools.update_wrapper(counted, save)

    def _purge(self, board: Any, step: int) -> None:
        """Let TensorBoard leave out the points of repeated steps."""
        if board._experiment is not None:  # noqa: SLF001
            board._experiment.close()  # noqa: SLF001
            set_known(board, "_experiment", None)
        board._kwargs["purge_step"] = step  # noqa: SLF001


def _kept_file(writer: Any) -> Path:
    return Path(writer.metrics_file_path + KEPT)


def _restore_rows(writer: Any, count: int) -> int:
    """Write the first ``count`` rows of the kept or present file; return their number."""
    metrics, kept = Path(writer.metrics_file_path), _kept_file(writer)
    source = kept if kept.exists() else metrics
    rows: list[dict[str, str]] = []
    keys: list[str] = []
    if source.exists():
        with source.open(newline="") as file:
            reader = csv.DictReader(file)
            rows, keys = list(reader)[:count], list(reader.fieldnames or ())
    if len(rows) < count:
        logger.warning(
            f"WARNING: Lightning: {metrics} has {len(rows)} of the {count} rows that were logged before this "
            "step: another node wrote it. Put the logger's directory where all nodes see it."
        )
    temporary = metrics.with_name(metrics.name + ".tmp")
    with translate_os_errors("write", metrics):
        if keys:
            with temporary.open("w", newline="") as file:
                table = csv.DictWriter(file, fieldnames=keys)
                table.writeheader()
                table.writerows(rows)
            temporary.replace(metrics)
        kept.unlink(missing_ok=True)
    writer.metrics, writer.metrics_keys = [], keys
    return len(rows)
