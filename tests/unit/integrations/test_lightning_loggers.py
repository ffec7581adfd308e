"""TensorBoard's files end where they ended at the restored step; LightningCLI may save its file again.

Loggers without a version take theirs in the order of the Trainer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_resume import constants
from elastic_resume.integrations.lightning_loggers import (
    EVENTS_JOURNAL,
    Loggers,
    RunLog,
    cut_points,
    mark_points,
)


class Board:
    """A TensorBoardLogger with a file, as far as it is read."""

    def __init__(self, directory: Path, name: str) -> None:
        self.log_dir, self.path = str(directory), directory / name
        self.path.touch()
        writer = SimpleNamespace(_file_name=str(self.path))
        self._experiment: Any = SimpleNamespace(
            file_writer=SimpleNamespace(event_writer=writer), flush=lambda: None, close=lambda: None
        )

    def log(self, text: str, order: int) -> None:
        """Write ``text`` in the step of ``order``, and come to its end."""
        with self.path.open("a") as file:
            file.write(text)
        mark_points(self, order)


def read_points(directory: Path) -> list[str]:
    """Return the content of the files, by name."""
    return [path.read_text() for path in sorted(directory.glob("events-*"))]


def test_points_of_repeated_steps_are_cut_off(tmp_path: Path) -> None:
    """Also in the file of a process all of whose steps are repeated, and twice."""
    first = Board(tmp_path, "events-1")
    for text, order in (("a", 2), ("b", 4), ("", 5), ("c", 6)):
        first.log(text, order)
    second = Board(tmp_path, "events-2")
    cut_points(second, 4)
    assert read_points(tmp_path) == ["ab", ""]
    second.log("c", 6)
    second.log("d", 8)
    cut_points(Board(tmp_path, "events-3"), 4)
    assert read_points(tmp_path) == ["ab", "", ""]
    cut_points(second, 6)  # a process that has stayed
    assert second._experiment is None
    assert (tmp_path / EVENTS_JOURNAL).exists()
    cut_points(first, None)
    assert not (tmp_path / EVENTS_JOURNAL).exists()
    cut_points(Board(tmp_path, "events-4"), 2)
    assert read_points(tmp_path) == ["ab", "", "", ""]


@pytest.mark.parametrize("is_restart", [False, True])
def test_configuration_is_overwritten_at_a_restart_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_restart: bool
) -> None:
    """LightningCLI would refuse the file of this run's first start."""

    class Saver:
        overwrite = False

    library: Any = ModuleType("library")
    library.loggers = SimpleNamespace(CSVLogger=type(None), TensorBoardLogger=type(None))
    monkeypatch.setitem(sys.modules, "library.cli", SimpleNamespace(SaveConfigCallback=Saver))
    node_dir = tmp_path / "job" / "n"
    node_dir.mkdir(parents=True)
    if is_restart:
        (node_dir / constants.LOGGER_VERSIONS_FILE).write_text(json.dumps([]))
    saver = Saver()
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(loggers=[], callbacks=[object(), saver], strategy=strategy)
    Loggers(trainer, library, {"ckpt_dir": tmp_path, "run_id": "job", "node_name": "n"})
    assert saver.overwrite is is_restart


class Versioned:
    """A logger of Lightning, as far as it takes a version."""

    _fs = SimpleNamespace(makedirs=os.makedirs)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._version: int | None = None

    @property
    def version(self) -> int:
        """The next free one, if it has none."""
        if self._version is None:
            self._version = len(list(self.directory.glob("version_*")))
        return self._version

    @property
    def log_dir(self) -> str:
        """The directory of the version."""
        return str(self.directory / f"version_{self.version}")


class Rows(Versioned):
    """A CSVLogger."""

    @property
    def experiment(self) -> Any:
        """The writer, which makes the directory."""
        Path(self.log_dir).mkdir(exist_ok=True)
        return SimpleNamespace(save=lambda: None)


class Points(Versioned):
    """A TensorBoardLogger."""


@pytest.mark.parametrize("kinds", [(Points, Rows), (Rows, Points), (Points, Rows, Points)])
def test_loggers_take_their_versions_in_the_order_of_the_trainer(
    tmp_path: Path, kinds: tuple[type[Versioned], ...]
) -> None:
    """As where Lightning opens them one after the other. A restart keeps the versions."""
    library: Any = SimpleNamespace(
        loggers=SimpleNamespace(CSVLogger=Rows, TensorBoardLogger=Points), __name__="library"
    )
    node_dir = tmp_path / "job" / "n"
    node_dir.mkdir(parents=True)
    for _ in range(2):
        made = [kind(tmp_path) for kind in kinds]
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        trainer = SimpleNamespace(loggers=made, callbacks=[], strategy=strategy)
        loggers = Loggers(trainer, library, {"ckpt_dir": tmp_path, "run_id": "job", "node_name": "n"})
        assert [one.version for one in made] == list(range(len(kinds)))
        (node_dir / constants.LOGGER_VERSIONS_FILE).write_text(json.dumps(loggers._read_versions()))


def make_run(logged: list[dict[str, Any]], kind: str) -> Any:
    """Return a run in whose third step something is logged."""
    generation = SimpleNamespace(
        log=lambda values, *, of_last_step, **_: logged.append({**values, "last": of_last_step}),
        progress=SimpleNamespace(position=SimpleNamespace(step=2)),
    )
    return SimpleNamespace(_generation=generation, plan=SimpleNamespace(kind=kind))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_logger", [True, False])
def test_what_loggers_get_goes_to_the_run(has_logger: bool) -> None:
    """Also without a logger, and past ``self.log()``; not what a resumed process logs before its loop."""
    import lightning.pytorch as pl  # noqa: PLC0415  seconds

    written: list[Any] = []

    class Own(pl.loggers.logger.DummyLogger):
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            written.append((args, kwargs))

    trainer = pl.Trainer(
        logger=Own() if has_logger else False, accelerator="cpu", enable_progress_bar=False, devices=1
    )
    trainer.state.fn, trainer.training = pl.trainer.states.TrainerFn.FITTING, True
    logged: list[dict[str, Any]] = []
    run_log = RunLog(trainer, make_run(logged, "resumed"))
    connector: Any = trainer._logger_connector
    connector.log_metrics({"loss": torch.tensor(0.5)})
    assert logged == []
    run_log.begin_loop()
    connector.log_metrics({"loss": torch.tensor(0.5)})
    assert logged == [{"loss": 0.5, "epoch": 0, "last": False}]
    connector.log_metrics({})
    if has_logger:
        (logger,) = trainer.loggers
        log: Any = logger.log_metrics
        log({"own": 2.0, "text": "left out"}, 2)
        assert logged[1:] == [{"own": 2.0, "last": False}]
        assert written[-1] == (({"own": 2.0, "text": "left out"}, 2), {})
    trainer.testing = True  # after fit()
    trainer.state.fn = pl.trainer.states.TrainerFn.TESTING
    count = len(logged)
    connector.log_metrics({"test": 1.0})
    assert len(logged) == count
    trainer.state.fn = pl.trainer.states.TrainerFn.FITTING
    run_log.begin_generation()  # in a process that stays
    connector.log_metrics({"loss": 1.0})
    assert len(logged) == count
