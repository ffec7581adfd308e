"""Let Lightning's loggers continue in their version after a restart, with each row and point once.

A CSVLogger or TensorBoardLogger without ``version=`` takes the next free number in each process, and
Lightning makes it before the state is restored. So each node notes the versions in its directory. A
CSVLogger also deletes the ``metrics.csv`` that it finds: that file is kept aside until the state is restored,
and then gets the rows back that were written before this state. TensorBoard's files end again where they
ended then, so no point of a repeated step is there twice.

What any logger gets is logged to the run too (`RunLog`).
"""

from __future__ import annotations

import csv
import functools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_resume import constants
from elastic_resume.checkpoint.atomic_io import translate_os_errors
from elastic_resume.config import Settings
from elastic_resume.data.batch_size import read_rank_and_world_size
from elastic_resume.data.rank_values import RankState
from elastic_resume.integrations import log_numbers, set_known
from elastic_resume.training.run import Run

logger = logging.getLogger(__name__)

KEPT = ".elastic_resume"  # suffix of a metrics.csv whose rows go back
EVENTS_JOURNAL = ".elastic_resume-events.jsonl"
"""Beside TensorBoard's files: how long each was at a step. [twice the step, file, bytes]"""
MARK = "_elastic_resume_mark"
_PLACE = ("ckpt_dir", "run_id", "node_name")


class Loggers(RankState):
    """The CSVLoggers and TensorBoardLoggers of one Trainer. Only rank 0 writes.

    ``has_started`` is whether the run's directory has had an earlier start that came to its training.
    """

    def __init__(self, trainer: Any, library: Any, resume_options: Mapping[str, Any]) -> None:
        """Give them the versions of an earlier start of this run. Called on all ranks, before they log."""
        super().__init__()
        csv_class, board_class = library.loggers.CSVLogger, library.loggers.TensorBoardLogger
        self._csv = [item for item in trainer.loggers if isinstance(item, csv_class)]
        self._boards = [item for item in trainer.loggers if isinstance(item, board_class)]
        self._trainer, self._library = trainer, library
        self._writers: list[Any] = []  # of CSV files, on rank 0
        self._rows_written: list[int] = []
        self._known_versions: list[Any] = []  # rank 0's
        self._run: Run | None = None
        self._is_local_leader = self._is_first = False
        place = {name: resume_options[name] for name in _PLACE if name in resume_options}
        settings = Settings.for_worker(os.environ, sys.argv[0], **place)
        self._file = settings.node_dir / constants.LOGGER_VERSIONS_FILE
        self._unnumbered = [one for one in (*self._csv, *self._boards) if one._version is None]  # noqa: SLF001
        is_new = resume_options.get("resume") == "never"
        noted = self._read_noted()  # None before this run's first start
        self._noted = None if is_new else noted
        self.has_started, versions = self._find_versions(noted is not None)
        self._set_versions(versions)
        if read_rank_and_world_size()[0] == 0:
            self._open()

    def begin_generation(self, run: Run) -> None:
        """Continue from the restored state. Called on all ranks; processes may have stayed."""
        self._run = run
        self._is_local_leader = run._generation.context.is_local_leader  # noqa: SLF001  not for scripts
        if run.rank:
            return
        self._note(self._read_versions())
        if run.plan.kind != "resumed":  # Lightning would have deleted them
            for writer in self._writers:
                _kept_file(writer).unlink(missing_ok=True)
        for board in self._boards:
            cut_points(board, self._order if run.plan.kind == "resumed" else None)

    # ---- at each step boundary -------------------------------------------------------------------------

    @property
    def _order(self) -> int:
        """The place of the present state: twice the step, or one more at the end of its epoch."""
        if self._run is None:
            return 0
        position = self._run._generation.progress.position  # noqa: SLF001
        return 2 * position.step + (position.step_in_epoch == 0)

    def read_own(self) -> dict[str, Any]:
        """Write what was logged; return the number of rows in each CSV file, and the versions."""
        for writer in self._writers:
            writer.save()
        for board in self._boards:
            mark_points(board, self._order)
        return {"rows": list(self._rows_written), "versions": self._read_versions()}

    def set_rows(self, rows: list[Any]) -> None:
        """Note the versions on each node: another one may have rank 0 at the next start."""
        super().set_rows(_without_versions(rows))
        self._known_versions = rows[0]["versions"]
        if self._is_local_leader:
            self._note(self._known_versions)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of rows. The versions are those of a directory, not of the training."""
        return {"values": _without_versions(super().state_dict()["values"])}

    def load_rows(self, rows: list[Any]) -> None:
        """Give each CSV file the rows that were written before the restored state."""
        if read_rank_and_world_size()[0] == 0 and not self._is_first:  # a process that has stayed
            self._set_versions(self._known_versions)
            self._open()
        for index, (writer, count) in enumerate(zip(self._writers, rows[0]["rows"], strict=False)):
            self._rows_written[index] = _restore_rows(writer, count)

    # ---- internals -------------------------------------------------------------------------------------

    def _read_noted(self) -> list[Any] | None:
        try:
            noted = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return None
        return noted if isinstance(noted, list) else None

    def _note(self, versions: list[Any]) -> None:
        if versions != self._noted:
            self._noted = versions
            with translate_os_errors("write", self._file):
                self._file.write_text(json.dumps(versions))

    def _read_versions(self) -> list[Any]:
        return [one.version for one in self._unnumbered] if self._is_first else []

    def _find_versions(self, has_started: bool) -> tuple[bool, list[int]]:
        """Return what any node has noted, since rank 0's may be new: an earlier start, and the versions.

        -1 stands for an unknown version.
        """
        count = len(self._unnumbered)
        noted = [one for one in self._noted or () if type(one) is int]
        numbers = noted if len(noted) == count else [-1] * count
        known = torch.tensor(
            [int(has_started), int(self._noted is not None), *numbers],
            device=self._trainer.strategy.root_device,
        )
        if dist.is_initialized():
            dist.all_reduce(known, dist.ReduceOp.MAX)
        is_known_start, continues, *found = known.tolist()
        if continues:
            self._let_configs_be_saved_again()
        return bool(is_known_start), found

    def _set_versions(self, numbers: list[int]) -> None:
        for one, number in zip(self._unnumbered, numbers, strict=False):
            if number >= 0:
                set_known(one, "_version", number)

    def _let_configs_be_saved_again(self) -> None:
        """Let LightningCLI overwrite the configuration of this run's first start, which it would refuse."""
        cli: Any = sys.modules.get(f"{self._library.__name__}.cli")
        for callback in self._trainer.callbacks if cli is not None else ():
            if isinstance(callback, cli.SaveConfigCallback):
                set_known(callback, "overwrite", True)

    def _open(self) -> None:
        """Open the CSV files before Lightning does, and keep the rows that are there.

        Loggers without a version take theirs in the Trainer's order, as where Lightning opens them.
        """
        self._is_first = True
        for one in self._trainer.loggers:
            if one in self._csv:
                self._open_csv(one)
            elif one in self._boards:  # its directory keeps the version from the next logger
                one._fs.makedirs(one.log_dir, exist_ok=True)  # noqa: SLF001

    def _open_csv(self, one: Any) -> None:
        metrics = Path(one.log_dir) / "metrics.csv"
        if metrics.exists():
            _keep(metrics)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Experiment logs directory")
            writer = one.experiment
        writer.save = functools.partial(self._save_counted, len(self._writers), writer.save)
        self._writers.append(writer)
        self._rows_written.append(0)

    def _save_counted(self, index: int, save: Callable[[], None]) -> None:
        writer = self._writers[index]
        self._rows_written[index] += len(writer.metrics)
        save()
        if self._run is not None:
            _drop_logged_again(writer, self._rows_written[index])


class RunLog:
    """Logs to the run what Lightning's loggers get, and without a logger what ``self.log()`` gets."""

    def __init__(self, trainer: Any, run: Run) -> None:
        """Wrap the loggers of ``trainer``."""
        self._trainer, self._run = trainer, run
        self.begin_generation()
        connector = trainer._logger_connector  # noqa: SLF001
        connector.log_metrics = functools.partial(self._log_without_logger, connector.log_metrics)
        for one in trainer.loggers:
            one.log_metrics = functools.partial(self._log, one.log_metrics)

    def begin_generation(self) -> None:
        """Log nothing of a resumed generation before `begin_loop`: a job has one start.

        Lightning logs hyperparameters and what ``on_train_start`` logs in each process.
        """
        self._has_begun = self._run.plan.kind != "resumed"

    def begin_loop(self) -> None:
        """Log what comes from now on."""
        self._has_begun = True

    def _log(
        self, original: Callable[..., None], metrics: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        original(metrics, *args, **kwargs)
        self._log_to_run(metrics)

    def _log_without_logger(
        self, original: Callable[..., None], metrics: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        original(metrics, *args, **kwargs)
        if metrics and not self._trainer.loggers:
            self._log_to_run({"epoch": self._trainer.current_epoch, **metrics})

    def _log_to_run(self, metrics: Mapping[str, Any]) -> None:
        is_fitting = self._trainer.state.fn == "fit" and not self._trainer.sanity_checking
        if self._has_begun and is_fitting:
            log_numbers(self._run, metrics)


def _without_versions(rows: list[Any]) -> list[Any]:
    return [{"rows": row["rows"]} for row in rows]


# ---- rows of a CSVLogger ----------------------------------------------------------------------------------


def _kept_file(writer: Any) -> Path:
    return Path(writer.metrics_file_path + KEPT)


def _keep(metrics: Path) -> None:
    """Move the rows aside. Rows that an earlier process left there and did not log again stay."""
    kept = metrics.with_name(metrics.name + KEPT)
    rows, keys = _read_table(metrics)
    more, more_keys = _read_table(kept)
    _write_table(kept, rows + more[len(rows) :], sorted({*keys, *more_keys}))
    metrics.unlink()


def _restore_rows(writer: Any, count: int) -> int:
    """Give the file its first ``count`` rows back; return how many there were."""
    metrics, kept = Path(writer.metrics_file_path), _kept_file(writer)
    if metrics.exists():  # of a process that has stayed
        _keep(metrics)
    rows, keys = _read_table(kept)
    if len(rows) < count:
        logger.warning(
            f"WARNING: Lightning: {metrics} has {len(rows)} of the {count} rows that were logged before this "
            "step: another node wrote it. Put the logger's directory where all nodes see it."
        )
    if rows[:count]:
        _write_table(metrics, rows[:count], keys)
    if len(rows) <= count:
        kept.unlink(missing_ok=True)
    writer.metrics, writer.metrics_keys = [], keys if rows[:count] else []
    return len(rows[:count])


def _drop_logged_again(writer: Any, count: int) -> None:
    """Remove the rows that were moved aside when as many were logged again."""
    kept = _kept_file(writer)
    if kept.exists() and len(_read_table(kept)[0]) <= count:
        kept.unlink()


def _read_table(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    if not path.exists():
        return [], []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return list(reader), list(reader.fieldnames or ())


def _write_table(path: Path, rows: list[dict[str, str]], keys: list[str]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with translate_os_errors("write", path):
        with temporary.open("w", newline="") as file:
            table = csv.DictWriter(file, fieldnames=keys)
            table.writeheader()
            table.writerows(rows)
        temporary.replace(path)


# ---- points of a TensorBoardLogger ------------------------------------------------------------------------


def mark_points(board: Any, order: int) -> None:
    """Write what was logged, which a kill would lose, and note how long the file is at ``order``."""
    path = find_events_file(board)
    if path is None:
        return
    board._experiment.flush()  # noqa: SLF001
    mark = [order, path.name, path.stat().st_size]
    if getattr(board, MARK, None) != mark[1:]:
        setattr(board, MARK, mark[1:])
        with translate_os_errors("write", path), path.with_name(EVENTS_JOURNAL).open("a") as journal:
            journal.write(json.dumps(mark) + "\n")


def cut_points(board: Any, order: int | None) -> None:
    """Cut off what was logged after ``order``, and will be again; with None forget a former job's files."""
    journal = Path(board.log_dir) / EVENTS_JOURNAL
    if order is None or not journal.exists():
        journal.unlink(missing_ok=True)
        return
    own = find_events_file(board)
    sizes: dict[str, int] = {}
    with translate_os_errors("read", journal):
        for line in journal.read_text().splitlines():
            at, name, size = json.loads(line)
            sizes[name] = size if at <= order else sizes.get(name, 0)
    if own is not None and own.name in sizes:  # a process that has stayed begins a new file
        board._experiment.close()  # noqa: SLF001
        set_known(board, "_experiment", None)
    for name, size in sizes.items():
        path = journal.with_name(name)
        if path.exists() and path.stat().st_size > size:
            with translate_os_errors("write", path):
                os.truncate(path, size)
    kept = "".join(json.dumps([order, name, size]) + "\n" for name, size in sizes.items())
    with translate_os_errors("write", journal):
        journal.write_text(kept)


def find_events_file(board: Any) -> Path | None:
    """Return the file of a TensorBoardLogger that has one; None if tensorboard does not tell."""
    writer = getattr(getattr(board._experiment, "file_writer", None), "event_writer", None)  # noqa: SLF001
    name = getattr(writer, "_file_name", None)
    return Path(name) if isinstance(name, str) and Path(name).exists() else None
