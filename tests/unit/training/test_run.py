"""A run in this process, alone in its world: positions, epochs, saves, hooks."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import elastic_resume as er
from elastic_resume import constants, events, failpoints
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.writer import RetentionPolicy
from elastic_resume.errors import ConfigError, ElasticResumeError, MismatchError, UsageError
from elastic_resume.mechanisms.mechanism import StepObserver
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.slots.progress_page import ProgressPage
from elastic_resume.state import state_dict
from elastic_resume.training import run as run_module

Begin = Callable[..., "Script"]


class Script:
    """A training script's objects, built anew as after a restart, and its run."""

    def __init__(
        self, directory: Path, samples: int = 12, batch: int = 3, micro_batch: int | None = None, **more: Any
    ) -> None:
        torch.manual_seed(4)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.batches = er.GlobalBatches(samples, batch, seed=1, micro_batch=micro_batch)
        self.loader: DataLoader[int] = DataLoader(list(range(samples)), batch_sampler=self.batches)  # type: ignore[arg-type]
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        names = {"ckpt_dir": directory, "run_id": "job", "node_name": "n"}
        self.run = er.resume(**{**objects, "data": self.batches, **names, **more})

    def step(self) -> None:
        """Take one optimizer step, and count it."""
        self.train()
        self.run.step()

    def train(self) -> None:
        """Take one optimizer step."""
        self.optimizer.zero_grad()
        self.model(torch.rand(2)).sum().backward()
        self.optimizer.step()


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Start scripts on one directory, each after the release of the last."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    scripts: list[Script] = []

    def build(**more: Any) -> Script:
        for script in scripts:
            script.run._release()
        scripts.append(Script(tmp_path, **more))
        return scripts[-1]

    yield build
    for script in scripts:
        script.run._release()


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of the valid checkpoints, newest first."""
    return [entry.step for entry in Catalog(directory / "job" / "n", "job").list_valid(read_data=True)]


def test_interrupted_epoch_resumes_with_remaining_samples(begin: Begin) -> None:
    """Two of four steps are saved; the resumed run reads the other half."""
    first, read = begin(), []
    for _ in first.run.epochs(1):
        for batch in first.loader:
            first.train()
            read += batch.tolist()
            first.run.step()
            if first.run.position.step == 2:
                first.run.save()
                break
        break
    second = begin()
    for epoch in second.run.epochs(1):
        assert epoch == 0
        for batch in second.loader:
            read += batch.tolist()
            second.run.step()
    assert sorted(read) == list(range(12))
    assert (second.run.position.epoch, second.run.position.samples) == (1, 12)


class Noisy(Dataset[float]):
    """A dataset of an image script: each sample draws, some more than others, and a batch may be one read."""

    classes = ("cat", "dog")

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(1 + index % 3)[0]) + random.random() + float(np.random.random())  # noqa: NPY002


class NoisyBatches(Noisy):
    """As Hugging Face's datasets, it reads a whole batch with one call."""

    def __getitems__(self, indices: list[int]) -> list[float]:
        """Read a batch."""
        return torch.rand(len(indices)).tolist()


def collate_with_noise(samples: list[float]) -> list[float]:
    """Mix a batch, as CutMix does."""
    return [sample + random.random() for sample in samples]


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Noisy(), {"num_workers": 1}),
        (Noisy(), {"num_workers": 2, "persistent_workers": True, "collate_fn": collate_with_noise}),
        (NoisyBatches(), {"num_workers": 2}),
        (Noisy(), {"num_workers": 0}),
        (Noisy(), {"num_workers": 1, "batch_size": None}),
    ],
)
def test_resumed_epoch_draws_same_samples_in_workers(
    begin: Begin, dataset: Noisy, options: dict[str, Any]
) -> None:
    """Nothing is said to er.seeded, and the loader's dataset stays the script's own."""
    seen: list[list[Any]] = []
    for stop in (99, 5, 99):  # undisturbed, left within the second epoch, resumed
        sampler = er.ElasticSampler(dataset)
        loader: DataLoader[float] = DataLoader(dataset, **{"batch_size": 8, **options}, sampler=sampler)
        name = "undisturbed" if not seen else "job"
        script, read = begin(data=loader, run_id=name), list[Any]()
        assert loader.dataset is dataset
        for epoch in script.run.epochs(2):
            sampler.set_epoch(epoch)
            for batch in loader:
                read.append(torch.as_tensor(batch).tolist())
                script.step()
                if script.run.position.step == stop:
                    break
            if script.run.position.step == stop:
                script.run.save()
                break
        seen.append(read)
        if isinstance(loader._iterator, _MultiProcessingDataLoaderIter):
            loader._iterator._shutdown_workers()
    undisturbed, first, second = seen
    assert first + second == undisturbed
    assert len(first) == 5
    assert len({str(batch) for batch in undisturbed}) == len(undisturbed)


@pytest.mark.parametrize("mode", ["derived", "off"])
def test_random_numbers_of_workers_are_left_alone_on_request(begin: Begin, mode: str) -> None:
    """With rng="off"."""
    script = begin(rng=mode)
    assert (script.batches.worker_seed is None) == (mode == "off")


def test_epoch_end_work_happens_once_after_resume(begin: Begin, tmp_path: Path) -> None:
    """A scheduler that steps at the end of an epoch is neither skipped nor stepped twice."""
    first = begin(save_every=4)
    for epoch in first.run.epochs(3):
        for _ in first.loader:
            first.step()
        first.scheduler.step()
        if epoch == 1:
            break  # killed here: the second epoch's end was not reached
    first.run._release()  # waits for the commit in flight
    assert saved_steps(tmp_path) == [4]
    second = begin(save_every=4)
    rates = []
    for epoch in second.run.epochs(3):
        steps = 0
        for _ in second.loader:
            second.step()
            steps += 1
        rates.append((epoch, second.scheduler.get_last_lr()[0], steps))
        second.scheduler.step()
    assert rates == [(1, 0.5, 4), (2, 0.25, 4)]


def test_save_after_last_batch_resumes_with_next_epoch(begin: Begin) -> None:
    """No epoch starts again with an empty loader."""
    first = begin()
    for _ in first.run.epochs(2):
        for _ in first.loader:
            first.step()
        first.scheduler.step()
        first.run.save()
        break
    second = begin()
    assert second.scheduler.get_last_lr() == [0.5]
    assert [(epoch, len(list(second.loader))) for epoch in second.run.epochs(2)] == [(1, 4)]


def test_finished_run_resumes_with_no_epoch(begin: Begin, tmp_path: Path) -> None:
    """The final state on disk includes the end of the last epoch."""
    first = begin(save_every=1000)
    for _ in first.run.epochs(2):
        for _ in first.loader:
            first.step()
        first.scheduler.step()
    assert saved_steps(tmp_path)[0] == 8
    second = begin()
    assert list(second.run.epochs(2)) == []
    assert second.scheduler.get_last_lr() == [0.25]


def read_every_other_batch(script: Script, loader: Iterable[Any], epochs: int = 2) -> int:
    """Count a step for every second batch, as if another rank read the others; return the steps."""
    for _ in script.run.epochs(epochs):
        for index, _ in enumerate(loader):
            if index % 2:
                script.run.step()
    return script.run.position.step


@pytest.mark.parametrize("passes_loader", [False, True])
def test_batches_that_no_step_is_counted_for_are_refused(begin: Begin, passes_loader: bool) -> None:
    """At the end of the epoch at the latest: they were never trained on, or a resume would repeat them."""
    script = begin()
    if passes_loader:
        script.batches.loader_prefetch = 0
    with pytest.raises(UsageError, match=r"once per 2 batches of the loader: give GlobalBatches .*micro_bat"):
        read_every_other_batch(script, script.loader)


def test_script_that_never_counts_a_step_is_refused(begin: Begin) -> None:
    """At the end of the first epoch. Later a script may have taken its last step."""
    script = begin()
    with pytest.raises(UsageError, match=r"run\.step\(\) was never called, so nothing would be saved"):
        [list(script.loader) for _ in script.run.epochs(2)]
    script = begin()
    for epoch in script.run.epochs(3):
        for _ in script.loader:
            if not epoch:
                script.run.step()


def test_unread_batches_of_long_epoch_are_refused_early(begin: Begin) -> None:
    """A lead that grows at every step is no reading ahead."""
    script = begin(samples=300)
    with pytest.raises(UsageError, match="once per 2 batches of the loader: give GlobalBatches"):
        read_every_other_batch(script, script.loader)
    assert script.run.position.step == 3


def accumulate(script: Script, loader: DataLoader[Any], count: int) -> list[list[int]]:
    """Train an epoch as a script does that takes a step per ``count`` batches; return the batches."""
    read: list[list[int]] = []
    for _ in script.run.epochs(script.run.position.epoch + 1):
        for index, batch in enumerate(loader):
            read.append(batch.tolist())
            if (index + 1) % count == 0 or index + 1 == len(loader):
                script.run.step()
                if len(read) == 2 * count and script.run.position.step == 2:
                    script.run.save()
                    return read
    return read


def make_accumulating_loader(samples: int = 60, **more: Any) -> DataLoader[Any]:
    """Return a loader of batches of two, with an `er.ElasticSampler`."""
    numbers: Any = list(range(samples))
    return DataLoader(numbers, 2, sampler=er.ElasticSampler(numbers, **more))


def test_accumulating_loop_resumes_at_its_next_step(begin: Begin) -> None:
    """Batches that make no whole step are left out, so the count of the loop begins at a step."""
    loaders = [make_accumulating_loader(61, batch_size=2, accumulate=4) for _ in range(2)]
    assert len(loaders[0]) == 28, "before resume, for a schedule"
    read = accumulate(begin(data=loaders[0]), loaders[0], 4)
    script = begin(data=loaders[1])
    read += accumulate(script, loaders[1], 4)
    samples = [number for batch in read for number in batch]
    assert (len(read), len(set(samples)), len(loaders[1])) == (28, 56, 28)
    assert (script.run.position.step, script.run.position.samples) == (7, 56)


def test_micro_batches_of_elastic_sampler_weigh_the_loss(begin: Begin) -> None:
    """A plain loop divides by itself, so a weight would be a second division."""
    loader = make_accumulating_loader(batch_size=2, accumulate=3)
    script = begin(data=loader)
    script.run.begin_epoch()
    with pytest.raises(UsageError, match=r"with accumulate= run\.loss_weight"):
        _ = script.run.loss_weight
    for _ in script.run.micro_batches(loader):
        assert script.run.loss_weight == pytest.approx(1 / 3)
        if script.run.last_micro_batch:
            script.run.step()
    assert script.run.position.step == 10


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("more", "count", "text"),
    [
        ({}, 4, r"once per 4 batches of the loader: make .*\.\.\., batch_size=2, accumulate=4\)"),
        ({"batch_size": 2, "accumulate": 2}, 4, "once per 4 batches"),
        ({"batch_size": 2, "accumulate": 4}, 2, "accumulate=4: call it once per optimizer step"),
    ],
)
def test_loop_with_other_accumulation_is_refused_in_its_first_steps(
    begin: Begin, more: dict[str, Any], count: int, text: str, workers: int
) -> None:
    """Not at the end of the epoch, and with the cause first; what a worker reads ahead is no step."""
    numbers: Any = list(range(80))
    loader = DataLoader(numbers, 2, sampler=er.ElasticSampler(numbers, **more), num_workers=workers)
    script = begin(data=loader)
    script.run.begin_epoch()
    with pytest.raises(UsageError, match=text):
        for index, _ in enumerate(loader):
            if (index + 1) % count == 0:
                script.run.step()
    assert script.run.position.step <= 2


def test_accumulation_that_cannot_be_counted_is_refused() -> None:
    """The number of batches must be known before resume, and an epoch must have a step."""
    with pytest.raises(ConfigError, match="add batch_size="):
        er.ElasticSampler(range(9), accumulate=2)
    batches = er.ElasticSampler(range(9), batch_size=3, accumulate=4).attach(3, drop_last=False)
    with pytest.raises(ConfigError, match="accumulate=4 leaves an epoch without a step"):
        batches.bind(0, 1)


def test_unread_batches_of_short_epochs_are_refused_in_the_second(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the loader may have read the rest of the epoch ahead."""
    script = begin()
    script.batches.loader_prefetch = 16
    monkeypatch.setattr(script.run._generation.progress, "_world_size", 2)
    with pytest.raises(UsageError, match="most samples would never be read"):
        read_every_other_batch(script, script.loader)
    assert script.run.position.epoch == 1


def test_reading_ahead_is_no_second_sharding(begin: Begin) -> None:
    """A script may read the whole epoch at once, or 20 batches ahead."""
    script = begin(samples=180)
    for epoch in script.run.epochs(2):
        ahead: list[Any] = []
        for batch in list(script.loader) if epoch else script.loader:
            ahead.append(batch)
            if len(ahead) > 20:
                script.run.step()
        for _ in range(min(20, len(ahead))):
            script.run.step()
    assert script.run.position.step == 120


def test_epoch_that_is_left_early_may_be_read_to_evaluate(begin: Begin) -> None:
    """With another iterator, that of the loop was left."""
    script = begin(samples=60)
    for _ in script.run.epochs(3):
        for index, _ in enumerate(script.loader):
            script.run.step()
            if index == 4:
                break
        list(script.loader)
    assert script.run.position.step == 15


def test_loop_over_epochs_may_belong_to_a_library(begin: Begin) -> None:
    """With begin_epoch and end_epoch the positions are those of epochs()."""
    script = begin()
    positions = []
    for epoch in range(2):
        assert script.run.begin_epoch() == epoch
        for _ in script.loader:
            script.run.step()
            positions.append(script.run.position)
        script.run.end_epoch()
    assert [(at.epoch, at.step_in_epoch, at.step) for at in positions] == [
        (step // 4, step % 4 + 1, step + 1) for step in range(8)
    ]
    assert script.run.position.epoch == 2


def test_loop_that_skips_finished_batches_reads_epoch_from_its_start(begin: Begin) -> None:
    """Some libraries skip by themselves."""
    script = begin()
    script.run.begin_epoch()
    whole = [batch.tolist() for batch in script.loader]
    script.run.step()
    script.run.step()
    script.run.save()
    again = begin()
    assert again.run.position.step_in_epoch == 2
    again.run.begin_epoch(from_start=True)
    assert [batch.tolist() for batch in again.loader] == whole
    assert [batch.tolist() for batch in again.loader] == whole, "nothing was finished since"
    again.run.step()
    assert [batch.tolist() for batch in again.loader] == whole[3:]


def test_weights_of_batches_are_known_ahead_of_their_steps(begin: Begin) -> None:
    """They are those that micro_batches() gives one by one."""
    script = begin(samples=10, batch=4, micro_batch=2)
    one_by_one = []
    for _ in script.run.epochs(1):
        for _ in script.run.micro_batches(script.loader):
            one_by_one.append((script.run.loss_weight, script.run.last_micro_batch))
            if script.run.last_micro_batch:
                script.run.step()
    ahead = begin(samples=10, batch=4, micro_batch=2, resume="never")
    ahead.run.begin_epoch()
    upcoming = list(ahead.run.upcoming_batches())
    assert [(one.loss_weight, one.is_last) for one in upcoming] == one_by_one
    assert [one.step_in_epoch for one in upcoming] == [0, 0, 1, 1, 2]
    for batch, one in zip(ahead.loader, upcoming, strict=True):
        assert len(batch) == 2
        if one.is_last:
            ahead.run.step()
    ahead.run.end_epoch()


def test_weights_ahead_need_the_order_of_samples(tmp_path: Path) -> None:
    """Without data= there is none."""
    run = er.resume(model=nn.Linear(2, 1), ckpt_dir=tmp_path, run_id="job", node_name="n")
    with pytest.raises(UsageError, match=r"upcoming_batches.*pass data="):
        run.upcoming_batches()
    run._release()


def run_under_agent(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Set what the agent gives its workers."""
    monkeypatch.setenv(constants.ENV_AGENT_PID, str(os.getpid()))
    monkeypatch.setenv(constants.ENV_CKPT_DIR, str(directory))
    monkeypatch.setenv(constants.ENV_RUN_ID, "job")
    monkeypatch.setenv(constants.ENV_NODE_NAME, "n")


def test_second_training_of_a_job_is_refused(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A next fold would continue the last one and train nothing. Without an agent, as in a test, warn."""
    begin().run.close()
    assert "called before" not in capsys.readouterr().err
    begin().run.close()
    assert "WARNING: er.resume() was called before in this process" in capsys.readouterr().err
    run_under_agent(monkeypatch, tmp_path)
    with pytest.raises(UsageError, match=r"would continue the first one\. Start it as a job of its own"):
        begin()
    monkeypatch.setenv(constants.ENV_RUN_ID, "another-job")
    begin()


def test_signals_are_taken_back_from_a_library(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A handler that was put over the run's own would delay a drain until the end of its grace period."""
    run_under_agent(monkeypatch, tmp_path)
    script = begin()
    mine = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    script.run.take_signals()
    assert signal.getsignal(signal.SIGTERM) == mine
    os.kill(os.getpid(), signal.SIGTERM)
    assert script.run._generation.drain_request.requested
    errors: list[BaseException] = []

    def take() -> None:
        try:
            script.run.take_signals()
        except UsageError as refused:
            errors.append(refused)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert errors, "only the main thread handles signals"


def test_signal_after_the_run_ends_the_process(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A library that puts the handler back in place after training has no further step."""
    run_under_agent(monkeypatch, tmp_path)
    script = begin()
    script.run.take_signals()
    mine = signal.getsignal(signal.SIGTERM)
    script.run.close()
    assert callable(mine)
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, number: sent.append(number))
    mine(signal.SIGTERM, None)
    assert sent == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_step_beyond_epoch_is_refused_with_advice(begin: Begin) -> None:
    """The script has its own loop over epochs."""
    script = begin()
    for _ in script.loader:
        script.run.step()
    assert script.run.loss_weight == 1.0, "a validation after the last batch may ask"
    with pytest.raises(UsageError, match=r"run\.epochs\(EPOCHS\)"):
        script.run.step()


def test_step_after_close_is_refused(begin: Begin) -> None:
    """No save would follow it."""
    script = begin()
    script.run.step()
    script.run.close()
    with pytest.raises(UsageError, match=r"after run\.close"):
        script.run.step()


def test_close_commits_newest_step_unless_exception_is_handled(
    begin: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step the state belongs to no step."""
    monkeypatch.setenv("ELASTIC_RESUME_LOG_LEVEL", "DEBUG")
    script = begin(save_every=1000)
    script.run.step()
    with script.run:
        script.run.step()
    assert saved_steps(tmp_path) == [2]
    again = begin(save_every=1000)
    with pytest.raises(ValueError, match="boom"), again.run:
        again.run.step()
        raise ValueError("boom")
    third = begin(save_every=1000)
    third.run.step()
    try:
        raise ValueError("boom")
    except ValueError:
        third.run.close()
    assert saved_steps(tmp_path) == [2]
    assert "nothing more was saved" in capsys.readouterr().err


def test_save_returns_same_path_for_same_step(begin: Begin) -> None:
    """The second save writes nothing."""
    script = begin(save_every=1000)
    script.run.step()
    path = script.run.save()
    assert path is not None
    assert path.is_dir()
    assert script.run.save() == path


@pytest.mark.parametrize("failing", ["once", "always"])
def test_final_save_is_retried_and_fails_without_checkpoint(
    failing: str, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One disk error does not lose the result. Exit code 0 without a checkpoint would be wrong."""
    monkeypatch.setattr(run_module, "RETRY_S", 0.0)
    script = begin(save_every=1000)
    failpoint = "commit.before-rename=raise" + ("@1" if failing == "once" else "")
    monkeypatch.setattr(failpoints, "_failpoints_by_name", failpoints._parse(failpoint))
    refused = pytest.raises(ElasticResumeError, match="end state")
    with contextlib.nullcontext() if failing == "once" else refused:
        for _ in script.run.epochs(1):
            for _ in script.loader:
                script.run.step()
    assert saved_steps(tmp_path) == ([4] if failing == "once" else [])
    kinds = [e["event"] for e in events.read_run(tmp_path / "job") if e["event"].startswith("commit")]
    assert kinds[0] == "commit-failed"
    assert ("commit" in kinds) == (failing == "once")


@pytest.mark.parametrize("begins_with", ["epochs", "step", "save"])
def test_hooks_run_once_before_training_of_resumed_state_only(begin: Begin, begins_with: str) -> None:
    """Hooks of both kinds run in one order, as do those that a hook registers."""
    first, seen = begin(), []
    first.run.on_resume(lambda _: seen.append("fresh start"))
    first.run.step()
    path = first.run.save()
    assert path is not None
    manifest = Manifest.parse((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_bytes(dataclasses.replace(manifest, world_size=3).to_bytes())
    run = begin().run

    @run.on_resume
    def record(given: er.Run) -> str:
        assert given is run
        seen.append(f"resumed at {given.position.step}")
        run.on_resume(lambda _: seen.append("registered by a hook"))
        return "ignored"

    run.on_world_change(lambda change: seen.append(f"{change.old_world_size} ranks before"))
    run.on_resume(lambda _: seen.append("last"))
    assert seen == []
    for _ in range(2):
        if begins_with == "epochs":
            next(iter(run.epochs(9)))
        else:
            getattr(run, begins_with)()
    assert seen == ["resumed at 1", "registered by a hook", "3 ranks before", "last"]
    assert record(run) == "ignored", "the decorator returns the function itself"


def test_exception_in_hook_reaches_script_and_later_hooks_do_not_run(begin: Begin, tmp_path: Path) -> None:
    """The step was not counted, and nothing is saved."""
    first = begin(save_every=1000)
    first.run.step()
    first.run.save()
    second, seen = begin(save_every=1), list[er.Run]()

    @second.run.on_resume
    def fail(_: er.Run) -> None:
        raise ValueError("boom")

    second.run.on_resume(seen.append)
    with pytest.raises(ValueError, match="boom"), second.run:
        second.run.step()
    assert (seen, second.run.position.step, saved_steps(tmp_path)) == ([], 1, [1])


def test_step_counts_only_when_its_snapshot_has_begun(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies before leaves no copy of the step, so a report must not count it."""
    monkeypatch.setenv("ELASTIC_RESUME_STEP_MARK_S", "0")
    script = begin()
    script.step()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("died")

    monkeypatch.setattr(script.run._generation.snapshot_scheduler, "after_step", fail)
    with pytest.raises(OSError, match="died"):
        script.step()
    script.run._release()
    page = ProgressPage(tmp_path / "job" / "n" / constants.PROGRESS_FILE)
    assert page.newest_progress(1) == (1, 1, 1)
    steps = [e["step"] for e in events.read_run(tmp_path / "job") if e["event"] == "step"]
    assert steps == [1]


def test_resume_refuses_optimizer_with_other_parameter_order(begin: Begin) -> None:
    """Equal shapes would otherwise hide that momentum moves to another parameter."""
    torch.manual_seed(0)

    def pair(names: str) -> dict[str, Any]:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
        parameters = [model.get_parameter(f"{name}.weight") for name in names]
        return {
            "model": model,
            "optimizer": torch.optim.SGD(parameters, lr=0.1),
            "scheduler": None,
            "data": None,
        }

    first = begin(**pair("ab"))
    first.run.step()
    first.run.save()
    begin(**pair("ab"))
    with pytest.raises(
        MismatchError, match=r"optimizer: model/b.weight stands where the checkpoint has 'model/a.weight'"
    ):
        begin(**pair("ba"))


def test_seed_of_first_start_survives_restarts(begin: Begin) -> None:
    """torch.manual_seed before resume() decides; an explicit seed overrides it."""
    first = begin()
    first.run.step()
    first.run.save()
    drawn = torch.rand(1)
    second = begin()
    assert torch.equal(torch.rand(1), drawn)
    third = begin(seed=99)
    assert not torch.equal(torch.rand(1), drawn)
    assert second.run.generation + 1 == third.run.generation


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"keep": 1}, "keep is 1"),
        ({"save_every": "x"}, "save_every"),
        ({"resume": "foo"}, "resume is 'foo'"),
        ({"run_id": "a/b"}, "run_id is 'a/b'"),
        ({"rng": "saved"}, "rng is 'saved'"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": 2**70}, "64 bits"),
    ],
    ids=str,
)
def test_resume_error_names_wrong_argument(begin: Begin, wrong: dict[str, Any], text: str) -> None:
    """The message has the value and the accepted forms."""
    with pytest.raises(ConfigError, match=text):
        begin(**wrong)


def test_resume_never_is_refused_under_agent_that_kept_earlier_run(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the agent can move the run aside: its event log and its slots are open."""
    monkeypatch.setenv(constants.ENV_AGENT_PID, "1")
    with pytest.raises(ConfigError, match="Give `--resume never` to the command"):
        begin(resume="never")


class Counter:
    """An object of the script with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the count."""
        self.count = state["count"]


def test_resume_restores_objects_of_track_under_their_names(begin: Begin) -> None:
    """The values may be tensors, objects, and dicts of them; checkpoints hold the names as given."""
    best, counter, nested = torch.tensor(2.0), Counter(7), Counter(8)
    first = begin(track={"best": best, "counter": counter, "more": {"a": nested}, "absent": None})
    first.run.step()
    path = first.run.save()
    assert path is not None
    plain = Manifest.parse((path / "manifest.json").read_bytes()).state
    own = {name for name in plain if not name.startswith(state_dict.RESERVED_PREFIX)}
    assert own == {"model", "optimizer", "scheduler", "data", "best", "counter", "more.a"}
    best, counter, nested = torch.tensor(0.0), Counter(), Counter()
    begin(track=MappingProxyType({"best": best, "counter": counter, "more": {"a": nested}}))
    assert (best.item(), counter.count, nested.count) == (2.0, 7, 8)


TRACK_HINT = 'Pass an object of your own as track={"%s": ...}.'


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"keeep": 5}, "resume() has no argument 'keeep'. Did you mean keep?"),
        ({"run_ids": 5}, "resume() has no argument 'run_ids'. Did you mean run_id?"),
        ({"zzz": 5}, "resume() has no argument 'zzz'."),
        (
            {"optimiser": nn.Linear(1, 1)},
            "resume() has no argument 'optimiser'. Did you mean optimizer? " + TRACK_HINT % "optimiser",
        ),
        (
            {"zzz": {"a": Counter()}, "yyy": torch.ones(2)},
            " ".join(f"resume() has no argument {name!r}. {TRACK_HINT % name}" for name in ("zzz", "yyy")),
        ),
        ({"track": 5}, 'track is int: pass a dict of objects by name, track={"name": object}.'),
        (
            {"track": {"ema": Counter()}},
            "track has the name 'ema', which is an argument: pass the object as ema=.",
        ),
        (
            {"track": {"elastic_resume": {"seed": Counter()}}},
            "'elastic_resume.seed' cannot name a tracked object: elastic_resume.* is reserved.",
        ),
        (
            {"track": {"a/b": Counter()}},
            "'a/b' cannot name a tracked object: use letters, digits, dots and '_'.",
        ),
        (
            {"track": {"a.b": Counter(), "a": {"b": Counter()}}},
            "two objects are tracked under the name 'a.b'; give each its own name.",
        ),
    ],
)
def test_resume_refuses_unknown_keyword_or_name(begin: Begin, wrong: dict[str, Any], text: str) -> None:
    """The message names the nearest argument, and track= if the value can be tracked."""
    with pytest.raises(ConfigError) as error:
        begin(**wrong)
    assert str(error.value) == text


def test_unknown_keyword_counts_as_deterministic_failure(begin: Begin) -> None:
    """The agent must not restart a worker that would fail in the same way."""
    with pytest.raises(ConfigError):
        begin(keeep=5)
    assert sys.excepthook.__module__ == "elastic_resume.training.worker_exit"


def test_docstring_of_resume_describes_each_argument() -> None:
    """The signature has the arguments by name for type checkers and editors."""
    arguments = inspect.signature(er.resume).parameters
    assert {parameter.kind for parameter in arguments.values()} == {inspect.Parameter.KEYWORD_ONLY}
    described = re.findall(
        r"^    (\w+): ", (inspect.getdoc(er.resume) or "").split("Raises:")[0], re.MULTILINE
    )
    assert described == list(arguments)


def test_resume_allocates_slots_once(
    begin: Begin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the state is known from the checkpoint."""
    monkeypatch.setenv("ELASTIC_RESUME_LOG_LEVEL", "DEBUG")
    first = begin()
    first.step()
    first.run.save()
    capsys.readouterr()
    second = begin()
    memory = second.run._generation.slot_client
    assert memory is not None
    assert memory._prepare_thread is not None
    memory._prepare_thread.join()
    second.step()
    second.run.save()
    assert len({slot.capacity for slot in memory.control_block.read_slots()}) == 1
    assert capsys.readouterr().err.count("slots of") == 1


def test_only_verified_local_checkpoint_is_trusted_for_pruning(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state received from another node proves nothing about this disk."""
    policies: list[RetentionPolicy] = []
    monkeypatch.setattr(CheckpointCommitter, "start_generation", lambda _, policy: policies.append(policy))
    for _ in range(2):
        script = begin()
        script.step()
        script.run.save()  # the committer answers in order
    begin(node_name="m").run.close()  # resumes from node n's checkpoint
    assert [policy.trusted_version for policy in policies] == [None, (1, 1), None]


def test_final_save_repeats_step_that_was_saved_before_epoch_end(begin: Begin) -> None:
    """Without data= a save may be due at an epoch's last step, before the work that follows it."""
    script = begin(data=None, save_every=2)
    for _ in script.run.epochs(1):
        for _ in range(4):
            script.step()
        script.run.save()
        script.scheduler.step()
    again = begin(data=None, save_every=2)
    assert (again.run.position.epoch, again.run.position.step) == (1, 4)
    assert again.scheduler.last_epoch == 1


def test_step_events_accumulate_stall_time(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that waits for the disk counts."""
    monkeypatch.setenv("ELASTIC_RESUME_STEP_MARK_S", "0")
    script = begin(snapshot_every=1, save_every=1000)
    script.step()
    script.step()
    commit = CheckpointCommitter._commit

    def late(*args: Any, **more: Any) -> Path | None:
        time.sleep(0.3)
        return commit(*args, **more)

    monkeypatch.setattr(CheckpointCommitter, "_commit", late)
    script.run.save()
    script.step()
    stalled = [e["stalled_s"] for e in events.read_run(tmp_path / "job") if e["event"] == "step"]
    assert 0 <= stalled[0] <= stalled[1] < stalled[1] + 0.3 <= stalled[2]


@pytest.mark.parametrize("loop", ["epochs", "steps"])
def test_repeated_steps_are_logged_where_they_are_repeated(
    begin: Begin, capsys: pytest.CaptureFixture[str], loop: str
) -> None:
    """A loop over steps goes on at its position, and repeats none."""
    first = begin(data=None)
    for _ in range(4):
        first.step()
    first.run.save()
    capsys.readouterr()
    second = begin(data=None)
    for _ in second.run.epochs(1) if loop == "epochs" else range(second.run.position.step, 6):
        second.step()
    log = capsys.readouterr().err
    assert ("epoch 0 starts over and repeats 4 finished steps" in log) == (loop == "epochs")


def test_one_restartable_function_per_process(begin: Begin) -> None:
    """A new worker would run the first one while the others are in the second."""
    run = begin().run
    calls = list[int]()
    train = run.restartable(calls.append)
    train(1)
    with pytest.raises(UsageError, match="make one function of both"):
        train(2)
    assert calls == [1]

    def yield_steps() -> Iterator[int]:
        yield 1

    with pytest.raises(UsageError, match="whose body does not run within its call"):
        run.restartable(yield_steps)


def test_values_logged_after_the_training_belong_to_its_last_step(begin: Begin) -> None:
    """Without ``run.close()`` too; what a script that leaves its loop has logged belongs to no step."""
    for left, expected in ((1, ["log"]), (2, ["log"]), (0, ["log", "close_step"])):
        script = begin(resume="never")
        calls: list[str] = []
        for loop in (1, 2):
            for _ in script.run.epochs(loop):
                for _ in script.loader:
                    script.step()
                if loop == left:
                    break
            if loop == left:
                break
        observer = StepObserver()
        observer.log = lambda *_, **__: calls.append("log")  # type: ignore[method-assign]  # noqa: B023
        observer.close_step = lambda position: calls.append("close_step")  # type: ignore[method-assign]  # noqa: ARG005, B023
        script.run._generation._observers = [observer]
        script.run.log(accuracy=0.9)
        script.run._release()
        assert calls == expected


def test_save_at_an_epochs_end_records_the_moment_that_it_saves(begin: Begin) -> None:
    """Else the values of that moment would count as missing, and a resume would pass over the checkpoint."""
    script, closed = begin(), list[tuple[int, int]]()
    observer = StepObserver()
    observer.close_step = lambda position: closed.append((position.step, position.epoch))  # type: ignore[method-assign]
    script.run._generation._observers = [observer]
    for _ in script.run.epochs(1):
        for _ in script.loader:
            script.step()
            if script.run.position.step == 2:
                script.run.save()
        script.run.save()
        assert closed == [(2, 0), (4, 1)]


def test_hook_of_a_notice_does_not_end_the_training(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop would go on after it, and the same command would never train again."""
    script = begin()

    @script.run.on_preemption
    def stop(notice: er.Preemption) -> None:
        assert notice.node == "n"
        script.run.stop()

    found = er.Preemption("a test", "n", 25.0)
    monkeypatch.setattr(script.run._generation, "find_notice", lambda: found)
    with pytest.raises(UsageError, match=r"in a hook of run\.on_preemption"):
        script.step()
    assert not script.run._is_stopped
    script.step()  # a script that has caught the error goes on
    script.run.stop()


@pytest.mark.parametrize("values", [[1.0], "loss"])
def test_log_takes_numbers_by_name(begin: Begin, values: Any) -> None:
    """The error says how, also where nothing is recorded."""
    with pytest.raises(UsageError, match=r"takes numbers by name, not a (list|str): run\.log\(loss=loss\)"):
        begin().run.log(values)
