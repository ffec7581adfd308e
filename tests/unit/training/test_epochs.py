"""Loops over er.epochs() and er.steps() in this process: what is a step, and where a resume goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Subset

import elastic_resume as er
from elastic_resume.errors import ConfigError, UsageError

SAMPLES, BATCH = 12, 3  # four batches in an epoch


class Job:
    """The objects of a script, built anew as after a restart."""

    def __init__(self, directory: Path, samples: int = SAMPLES, **sampler: Any) -> None:
        torch.manual_seed(4)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        numbers: Any = list(range(samples))
        self.sampler: DistributedSampler[Any] = DistributedSampler(numbers, 1, 0, **sampler)
        self.loader: DataLoader[Any] = DataLoader(numbers, BATCH, sampler=self.sampler)
        self.directory = directory
        self.run: er.Run | None = None
        self.read: list[list[int]] = []

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Return the arguments of resume()."""
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        names = {"ckpt_dir": self.directory, "run_id": "job", "node_name": "n", "save_every": 1000}
        return {**objects, **names, **more}

    def epochs(self, count: int = 2, **more: Any) -> Any:
        """Return the loop's epochs."""
        epochs = er.epochs(count, more.pop("data", self.loader), **self.arguments(**more))
        self.run = epochs.run
        return epochs

    def train(self, batch: torch.Tensor) -> None:
        """Take one optimizer step, and what follows it."""
        self.read.append(batch.tolist())
        self.backward()
        self.optimizer.step()
        self.scheduler.step()

    def backward(self) -> None:
        """Compute gradients."""
        self.optimizer.zero_grad()
        self.model(torch.rand(2)).sum().backward()

    @property
    def at(self) -> tuple[int, int, int]:
        """Return epoch, step in the epoch and step of the run."""
        assert self.run is not None
        position = self.run.position
        return position.epoch, position.step_in_epoch, position.step


Begin = Callable[..., Job]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Start jobs on one directory, each after the release of the last."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    jobs: list[Job] = []

    def release() -> None:
        for job in jobs:
            if job.run is not None:
                job.run._release()

    def build(**more: Any) -> Job:
        release()
        jobs.append(Job(tmp_path, **more))
        return jobs[-1]

    yield build
    release()


def test_loop_of_one_line_ends_as_that_of_five(begin: Begin) -> None:
    """Bit for bit, with work after the optimizer's step, a sampler that is taken over, and a resume."""
    whole = begin(seed=3, shuffle=True)
    sampler = er.ElasticSampler(list(range(SAMPLES)), seed=3)
    loader: DataLoader[Any] = DataLoader(list(range(SAMPLES)), BATCH, sampler=sampler)  # type: ignore[arg-type]
    whole.run = run = er.resume(**whole.arguments(data=loader, run_id="five"))
    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            whole.train(batch)
            run.step()
    first = begin(seed=3)
    for epoch in (epochs := first.epochs()):
        first.sampler.set_epoch(epoch)
        for batch in first.loader:
            first.train(batch)
            if len(first.read) == 6:
                epochs.run.save()
                break
        if len(first.read) == 6:
            break
    second = begin(seed=3)
    epochs = second.epochs()
    assert (second.at, len(second.loader)) == ((1, 2, 6), 4)
    for epoch in epochs:
        second.sampler.set_epoch(epoch)
        for batch in second.loader:
            second.train(batch)
    assert first.read + second.read == whole.read
    assert (second.at, second.scheduler.last_epoch) == ((2, 0, 8), 8)
    assert torch.equal(second.model.weight, whole.model.weight)


def test_sampler_is_taken_over_with_its_arguments(begin: Begin) -> None:
    """Of a loader without batches and of one with a batch sampler too; a subclass has an order of its own."""
    job = begin(samples=14, seed=9, shuffle=False, drop_last=True)
    job.epochs()
    new = job.loader.sampler
    assert isinstance(new, er.ElasticSampler)
    assert (new.seed, new.shuffle, new.drop_last, new.dataset) == (9, False, True, list(range(14)))
    assert isinstance(job.loader.batch_sampler, BatchSampler)
    assert job.loader.batch_sampler.sampler is new
    assert (type(job.loader).__name__, len(job.loader)) == ("DataLoader", 5)

    class Own(DistributedSampler[int]):
        """A sampler with an order of its own."""

    numbers: Any = list(range(6))
    for sampler, text in (
        (Own(numbers, 1, 0), "position in an epoch cannot be restored"),
        (RandomSampler(numbers), "the loader has no DistributedSampler, so each rank would read the whole"),
    ):
        job = begin()
        with pytest.raises(ConfigError, match=text):
            job.epochs(data=DataLoader(numbers, 3, sampler=sampler))
    job = begin()
    with pytest.raises(ConfigError, match="made for rank 1 of 2, and this is rank 0 of 1"):
        job.epochs(data=DataLoader(numbers, 3, sampler=DistributedSampler(numbers, 2, 1)))


def accumulate(job: Job, epochs: Any, count: int) -> None:
    """Train with a step per ``count`` batches."""
    for _ in epochs:
        for index, batch in epochs.enumerate(job.loader):
            job.read.append(batch.tolist())
            job.model(torch.rand(2)).sum().backward()
            if (index + 1) % count == 0:
                job.optimizer.step()
                job.optimizer.zero_grad()


def test_accumulation_counts_optimizer_steps(begin: Begin) -> None:
    """With accumulate=, in the sampler taken over."""
    job = begin(samples=26)
    epochs = job.epochs(accumulate=4)
    assert len(job.loader) == 8
    accumulate(job, epochs, 4)
    assert (job.at, len(job.read)) == ((2, 0, 4), 16)
    job = begin(samples=26)
    with pytest.raises(
        UsageError, match=r"step per 1 batch of its loader.*per 4 batches\. Leave accumulate="
    ):
        accumulate(job, job.epochs(accumulate=4, run_id="other"), 1)
    assert job.at == (0, 0, 0)


@pytest.mark.parametrize("samples", [SAMPLES, 60])
def test_forgotten_accumulation_is_refused_before_a_step_counts(begin: Begin, samples: int) -> None:
    """At the second step, or at the end of an epoch with one."""
    job = begin(samples=samples)
    with pytest.raises(UsageError, match=r"one optimizer step per 4 batches.*accumulate=4\)"):
        accumulate(job, job.epochs(), 4)
    assert job.at == (0, 0, 0)


def test_own_data_order_says_how_it_accumulates(begin: Begin) -> None:
    """The advice is that of the order; accumulate= is not for it."""
    numbers: Any = list(range(60))
    job = begin()
    job.loader = DataLoader(numbers, 3, sampler=er.ElasticSampler(numbers))
    with pytest.raises(UsageError, match=r"er\.ElasticSampler\(\.\.\., batch_size=3, accumulate=4\)"):
        accumulate(job, job.epochs(), 4)
    job = begin()
    with pytest.raises(ConfigError, match="got accumulate=4, and the loader's own data order"):
        job.epochs(accumulate=4, data=DataLoader(numbers, 3, sampler=er.ElasticSampler(numbers)))


def test_several_optimizers_on_one_batch_are_one_step(begin: Begin) -> None:
    """As of a GAN; one of them may leave batches out."""
    job = begin()
    generator = nn.Linear(1, 1)
    other = torch.optim.Adam(generator.parameters())
    optimizers = {"d": job.optimizer, "g": other}
    for _ in job.epochs(optimizer=optimizers, track={"generator": generator}):
        for index, batch in enumerate(job.loader):
            job.train(batch)
            if index % 2:
                other.step()
                job.optimizer.step()
    assert job.at == (2, 0, 8)


def test_step_that_a_scaler_leaves_out_counts(begin: Begin) -> None:
    """Its batch was read. The first steps of float16 training are such."""
    job = begin()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    epochs, positions = job.epochs(scaler=scaler), []
    for _ in epochs:
        for _ in job.loader:
            positions.append(job.at[2])
            job.optimizer.zero_grad()
            scaler.scale(job.model(torch.full((2,), 1e30)).sum()).backward()
            scaler.step(job.optimizer)
            scaler.update()
    assert positions == list(range(8))
    assert scaler.get_scale() < 2.0**127


def test_skipped_batch_counts_with_the_next_step(begin: Begin) -> None:
    """So a resume reads the batch after it. Those at the end of an epoch count when the loader ends."""
    job, positions = begin(), []
    for epoch in (epochs := job.epochs()):
        for index, batch in enumerate(job.loader):
            positions.append(job.at[1])
            if (epoch, index) in {(0, 2), (1, 0), (1, 3)}:
                continue  # its loss is NaN
            job.train(batch)
        assert job.at[1] == 4
        epochs.run.save()
    assert positions == [0, 1, 2, 2, 0, 0, 2, 3]
    assert job.at == (2, 0, 8)


def test_loop_that_comes_to_skip_for_long_is_refused(begin: Begin) -> None:
    """It accumulates now."""
    job = begin(samples=120)
    with pytest.raises(UsageError, match="one optimizer step per 2 batches"):
        for _ in job.epochs():
            for index, batch in enumerate(job.loader):
                if index < 3 or index % 2:
                    job.train(batch)


def read_ahead(loader: Any) -> Iterator[Any]:
    """Yield each batch after the next one was read."""
    iterator = iter(loader)
    batch = next(iterator)
    for following in iterator:
        yield batch
        batch = following
    yield batch


def test_loop_that_reads_ahead_is_refused_before_a_step_counts(begin: Begin) -> None:
    """It looks like one that leaves out the first batch. A resumed job is known not to."""
    job = begin()
    with pytest.raises(UsageError, match="came after 2 and 1 batches of the loader"):
        for _ in job.epochs():
            for batch in read_ahead(job.loader):
                job.train(batch)
    assert job.at == (0, 0, 0)
    first = begin()
    for _ in (epochs := first.epochs()):
        for batch in first.loader:
            first.train(batch)
            epochs.run.save()
            break
        break
    second = begin()
    for _ in second.epochs():
        for index, batch in enumerate(second.loader):
            if index:
                second.train(batch)
    assert second.at == (2, 0, 8)


def test_whole_epoch_that_is_read_at_once_is_refused(begin: Begin) -> None:
    """All steps are on batches that were read before."""
    job = begin()
    with pytest.raises(UsageError, match=r"one optimizer step per 4 batches.*read before"):
        for _ in job.epochs():
            for batch in list(job.loader):
                job.train(batch)


def test_thread_that_reads_the_loader_is_refused(begin: Begin) -> None:
    """Its requests come at any time."""
    job, batches = begin(), list[Any]()
    with pytest.raises(UsageError, match="another thread reads the loader"):
        for _ in job.epochs():
            thread = threading.Thread(target=lambda: batches.extend(job.loader))
            thread.start()
            thread.join()
            job.train(batches[0])


def test_evaluation_reads_the_same_loader(begin: Begin) -> None:
    """Within a step, after a break, and after the epoch; none of it is a step."""
    job = begin()
    for epoch in job.epochs(3):
        if epoch == 1:
            assert len(list(job.loader)) == 4
        for index, batch in enumerate(job.loader):
            job.train(batch)
            if index == 1:
                assert len(list(job.loader)) == 3
            if epoch == 2 and index == 2:
                break
        list(job.loader)
    assert job.at == (3, 0, 11)


@pytest.mark.parametrize("kind", ["second pass", "old iterator"])
def test_iterator_without_a_position_is_refused(begin: Begin, kind: str) -> None:
    """A resume would read other batches."""
    job = begin()
    text = "second iterator over its loader" if kind == "second pass" else "made before this epoch"
    with pytest.raises(UsageError, match=text):
        iterator = iter(job.loader)
        for _ in job.epochs():
            iterator = iterator if job.at[0] and kind == "old iterator" else iter(job.loader)
            for _ in range(2):
                job.train(next(iterator))
            if kind == "second pass":
                for batch in [*iterator, *job.loader]:
                    job.train(batch)


def test_break_counts_the_step_and_exception_does_not(
    begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step is counted when the loop asks for the next epoch, and nothing on the way out of an exception."""
    job = begin()
    for epoch in job.epochs(2):
        for batch in job.loader:
            job.train(batch)
            if epoch == 0:
                break
    assert job.at == (2, 0, 5)
    job = begin()
    with pytest.raises(OSError, match="disk"):
        for _ in (epochs := job.epochs(3)):
            for batch in job.loader:
                job.train(batch)
                if len(job.read) == 2:
                    try:
                        raise OSError("disk")
                    finally:
                        assert epochs.run.save() is None
                        with pytest.raises(UsageError, match=r"run\.stop\(\) was called while an exception"):
                            epochs.run.stop()
    assert job.at == (2, 1, 6)
    assert "nothing is saved" in capsys.readouterr().err


def test_loop_that_is_left_is_named_at_a_normal_end(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command goes on there. With a loop over run.epochs() too."""
    for data in (None, "loader"):
        job = begin()
        job.run = er.resume(**job.arguments()) if data is None else job.epochs(3).run
        for _ in job.run.epochs(3):
            break
        job.run.close()
        text = "the loop was left in epoch 1 of 3, and the same command will go on at the newest checkpoint"
        assert capsys.readouterr().err.count(text) == 1


@pytest.mark.parametrize("place", ["step", "epoch end", "epoch begin"])
def test_stopped_training_is_over_for_good(
    begin: Begin, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step before counts, the state is saved, and the checkpoint knows it."""
    job = begin()
    for epoch in (epochs := job.epochs(5, snapshot_every=1)):
        if place == "epoch begin" and epoch == 1:
            epochs.run.stop()
            break
        for index, batch in enumerate(job.loader):
            job.train(batch)
            if place == "step" and index == 1:
                epochs.run.stop()
                epochs.run.stop()
                with pytest.raises(UsageError, match=r"takes another step after run\.stop\(\)"):
                    epochs.run._finish_steps(1)
                break
        if place == "epoch end":
            epochs.run.stop()
    steps = {"step": 2, "epoch end": 4, "epoch begin": 5}[place]  # the last has a state of its own
    assert job.at[2] == steps
    again = begin()
    assert list(again.epochs(9)) == []
    assert (again.at[2], again.scheduler.last_epoch) == (steps, steps - (place == "epoch begin"))
    log = capsys.readouterr().err
    assert "the same command" not in log
    assert "nothing is left to train: run.stop() has ended the training." in log


class Prefetcher:
    """Moves batches to the GPU one ahead of the loop, as timm's PrefetchLoader does."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[torch.Tensor]:
        batches = iter(self.loader)
        ahead = next(batches, None)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            yield batch


def test_object_around_a_loader_is_the_loader_of_the_loop(begin: Begin) -> None:
    """Its requests end the steps, though it reads its loader ahead; the sampler within it is taken over."""
    whole = begin(seed=3)
    for epoch in whole.epochs():
        whole.sampler.set_epoch(epoch)
        for batch in whole.loader:
            whole.train(batch)
    whole.directory /= "ahead"
    jobs = []
    for _ in range(2):
        jobs.append(begin(seed=3))
        job = jobs[-1]
        job.directory = whole.directory
        loader = Prefetcher(job.loader)
        for epoch in (epochs := job.epochs(data=loader)):
            job.sampler.set_epoch(epoch)
            for batch in loader:
                job.train(batch)
                if job is jobs[0] and len(job.read) == 6:
                    epochs.run.save()
                    break
            if job is jobs[0] and len(job.read) == 6:
                break
    assert jobs[0].read + jobs[1].read == whole.read
    assert (jobs[1].at, jobs[1].scheduler.last_epoch) == ((2, 0, 8), 8)


def test_dataset_of_another_order_is_named_at_the_restart(
    begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    """As random_split() draws it without a seed."""
    for order, warned in (([*range(SAMPLES)], 0), ([*range(SAMPLES)], 0), ([*range(SAMPLES)][::-1], 1)):
        job = begin()
        sampler = DistributedSampler(subset := Subset(range(99), order), 1, 0)  # type: ignore[var-annotated, arg-type]
        job.loader = DataLoader(subset, BATCH, sampler=sampler)
        for _ in (epochs := job.epochs(9)):
            for batch in job.loader:
                job.train(batch)
            epochs.run.save()
            break
        log = capsys.readouterr().err
        assert log.count("the dataset of data= is not the same at each start of this job") == warned


def test_index_goes_on_in_a_resumed_epoch(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    """That of `enumerate` does not, and the log says so once in a job, unless the loop uses ours."""
    indices: list[int] = []
    for start in range(5):
        job = begin(samples=30)
        for _ in (epochs := job.epochs(accumulate=2)):
            for index, _ in epochs.enumerate(job.loader) if start < 3 else enumerate(job.loader):
                indices.append(index)
                if index % 2:
                    job.optimizer.step()
                    epochs.run.save()
                    break
            break
        hints = capsys.readouterr().err.count("write run.enumerate(loader)")
        assert hints == (start == 3)
    assert indices == [0, 1, 2, 3, 4, 5, 0, 1, 0, 1]


def test_library_that_owns_the_loop_is_told_nothing_of_its_index(
    begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    """It calls begin_epoch() itself, and its users have no index of a loader."""
    for start in (0, 2):
        job = begin()
        job.epochs()
        assert job.run is not None
        job.run._release()
        job.run = run = er.resume(**job.arguments(data=job.loader, run_id="library"))
        assert job.at[1] == start
        run.begin_epoch()
        for _, batch in zip(range(2), job.loader, strict=False):
            job.train(batch)
            run.step()
        run.save()
    assert "enumerate" not in capsys.readouterr().err


def test_loader_that_was_looked_into_first_is_the_loops_all_the_same(begin: Begin) -> None:
    """On one rank alone, perhaps: if its steps did not count, the others would wait in their collectives."""
    for is_kept in (True, False):
        job = begin()
        for _ in job.epochs(1):
            looked = iter(job.loader)
            next(looked)
            if not is_kept:
                del looked
            for batch in job.loader:
                job.train(batch)
        assert job.at == (1, 0, 4), is_kept


def test_evaluation_before_the_first_step_is_not_the_loop(begin: Begin) -> None:
    """The loop goes on with its own iterator."""
    job = begin()
    for _ in job.epochs(1):
        for index, batch in enumerate(job.loader):
            if index == 0:
                assert len(list(job.loader)) == 4
            job.train(batch)
    assert job.at == (1, 0, 4)


def test_loop_that_never_reads_its_loader_is_refused(begin: Begin) -> None:
    """Else no step would count, and a failure would cost all epochs."""
    job = begin()
    numbers: Any = list(range(SAMPLES))
    other: DataLoader[Any] = DataLoader(numbers, BATCH)
    for _ in job.epochs():
        with pytest.raises(UsageError, match="has read no batch of its loader"):
            for batch in other:
                job.train(batch)
        break
    assert len(job.read) == 2


def test_schedule_that_steps_after_a_save_is_named(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint lacks that. At the top of the body it belongs to the step, and nothing is said."""
    job = begin()
    for _ in (epochs := job.epochs(1)):
        for index, _ in enumerate(job.loader):
            if index:
                job.scheduler.step()
            job.backward()
            job.optimizer.step()
            if index == 2:
                epochs.run.save()
                job.scheduler.step()
    log = capsys.readouterr().err
    assert log.count("scheduler stepped after run.save() and before the loop's next batch") == 1
    assert log.count("WARNING") == 1


def test_draw_at_the_top_of_an_interrupted_epoch_is_the_same(begin: Begin) -> None:
    """It is that of the epoch's first step."""
    draws = []
    for last in (6, 8):
        job = begin()
        for _ in (epochs := job.epochs()):
            draws.append(torch.rand(1).item())
            for batch in job.loader:
                job.train(batch)
                if job.at[2] + 1 == last == 6:
                    epochs.run.save()
                    break
            if last == 6 == job.at[2]:
                break
    assert len(draws) == 3
    assert draws[1] == draws[2]


def test_exception_in_a_begun_step_saves_nothing(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    """Buffers may have changed. An exception that the program began in does not matter."""
    job = begin()
    try:
        raise ImportError
    except ImportError:
        for _ in (epochs := job.epochs(1)):
            for index, batch in enumerate(job.loader):
                if index == 1:
                    assert epochs.run.save() is not None
                if index == 2:
                    try:
                        raise KeyboardInterrupt
                    except KeyboardInterrupt:
                        assert epochs.run.save() is None
                job.train(batch)
    assert job.at == (1, 0, 4)
    assert capsys.readouterr().err.count("nothing is saved") == 1


def test_one_step_per_epoch_is_enough(begin: Begin) -> None:
    """Training on the whole dataset at once."""
    job = begin(samples=3)
    for _ in job.epochs(4):
        for batch in job.loader:
            job.train(batch)
    assert job.at == (4, 0, 4)


def test_inner_optimizer_of_a_wrapper_counts(begin: Begin) -> None:
    """As of SAM, whose own step() is never called."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base, self.param_groups = base, base.param_groups

    job = begin()
    wrapper = Wrapper(job.optimizer)
    for _ in job.epochs(1, optimizer=wrapper):
        for _ in job.loader:
            job.backward()
            wrapper.base.step()
    assert job.at == (1, 0, 4)


def test_other_length_of_the_loader_is_named(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    """A schedule that was built from it would not end with the training."""
    begin(samples=14).epochs(accumulate=2)
    assert "len(loader) was 5 before er.epochs(), and is 4" in capsys.readouterr().err
    begin().epochs(accumulate=2)
    assert "len(loader) was" not in capsys.readouterr().err


def test_loader_in_a_loop_over_steps_is_named(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    """Its position is not kept."""
    job = begin()
    steps = er.steps(3, **job.arguments())
    job.run, batches = steps.run, iter(job.loader)
    for _ in steps:
        job.train(next(batches))
    log = capsys.readouterr().err
    assert log.count("the loop reads a DataLoader of a list, whose position no checkpoint holds") == 1
    assert "write er.epochs(count, loader, ...)" in log


class TokenLoader:
    """A loader that keeps a position, as in scripts without a DataLoader."""

    def __init__(self) -> None:
        self.position = 0

    def next_batch(self) -> torch.Tensor:
        """Return the next batch."""
        self.position += 1
        return torch.tensor([self.position])

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the position."""
        self.position = state["position"]


class Meter:
    """Counts, as AverageMeter of PyTorch's example for ImageNet."""

    def __init__(self) -> None:
        self.count = 0


def generate() -> Iterator[torch.Tensor]:
    """Yield batches for ever."""
    position = 0
    while True:
        position += 1
        yield torch.tensor([position])


@pytest.mark.parametrize("is_tracked", [False, True])
def test_loader_of_the_script_that_counts_on_is_named(
    begin: Begin, is_tracked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its variable: an object with a position, and a generator. Not one whose position stays."""
    job = begin()
    train_loader, val_loader, batches = TokenLoader(), TokenLoader(), generate()
    batch_time = Meter()
    steps = er.steps(
        5, **job.arguments(track={"train_loader": er.per_rank(train_loader)} if is_tracked else None)
    )
    job.run = steps.run
    for step in steps:
        job.train(train_loader.next_batch() if step % 2 or is_tracked else next(batches))
        val_loader.position = 0
        batch_time.count += 1
    log = capsys.readouterr().err
    named = "TokenLoader) counts on: the first steps have changed its 'position', and no checkpoint holds it"
    assert log.count(named) == log.count("er.per_rank(train_loader)") == (not is_tracked)
    assert (
        log.count("batches (a generator) counts on")
        == log.count("a function with yield cannot")
        == (not is_tracked)
    )
    assert ("WARNING: train_loader (a" in log) != is_tracked
    assert "val_loader" not in log
    assert "batch_time" not in log


@pytest.mark.parametrize("is_pair", [True, False])
def test_second_loader_is_named_if_it_is_open_between_two_steps(
    begin: Begin, is_pair: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pairs of batches would differ after a resume. That of an evaluation is read to its end, or left."""
    job = begin()
    second: DataLoader[Any] = DataLoader(list(range(40)), 2)  # type: ignore[arg-type]
    kept = iter(second)
    assert len(list(kept)) == 20
    for _ in job.epochs(1):
        for batch in (first for first, _ in zip(job.loader, second, strict=False)) if is_pair else job.loader:
            job.train(batch)
            next(iter(second))
    assert capsys.readouterr().err.count("read both through one dataset") == is_pair


def test_loop_over_steps_resumes_at_its_next_step(begin: Begin) -> None:
    """A save within the last step's body counts it once; a step without an optimizer's counts too."""
    taken: list[tuple[int, float]] = []
    for start in (0, 3, 6):
        job = begin()
        steps = er.steps(6, **job.arguments())
        job.run = steps.run
        for step in steps:
            taken.append((step, torch.rand(1).item()))
            if step != 1:
                job.train(torch.ones(1))
            if step == 2:
                steps.run.save()
                break
        assert job.at[2] == max(3, 6 * bool(start))
    whole = begin()
    steps = er.steps(6, **whole.arguments(run_id="whole"))
    whole.run = steps.run
    drawn = []
    for step in steps:
        drawn.append((step, torch.rand(1).item()))
        if step != 1:
            whole.train(torch.ones(1))
    assert taken == drawn
    assert torch.equal(whole.model.weight, job.model.weight)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda job: er.epochs(2, **job.arguments()), "er.epochs() got no loader"),
        (
            lambda job: job.epochs(optimizer=None, scheduler=None),
            "an optimizer of torch takes one, and got none",
        ),
        (lambda job: job.epochs(keeep=1), "has no argument 'keeep'. Did you mean keep?"),
        (lambda job: job.epochs(accumulate=0), "accumulate"),
        (lambda job: job.epochs(-1), "count"),
        (lambda job: er.steps(2, data=job.loader, **job.arguments()), "er.steps() got data="),
    ],
)
def test_wrong_arguments_are_named(begin: Begin, call: Callable[[Job], Any], text: str) -> None:
    """Before anything is trained."""
    with pytest.raises(ConfigError) as error:
        call(begin())
    assert text in str(error.value)


def test_step_that_the_script_counts_too_is_refused(begin: Begin) -> None:
    """It would count twice. Without any optimizer step nothing would be saved."""
    job = begin()
    with pytest.raises(UsageError, match=r"which counts the steps: leave run\.step\(\) out"):
        for _ in (epochs := job.epochs()):
            for batch in job.loader:
                job.train(batch)
                epochs.run.step()
    job = begin()
    with pytest.raises(UsageError, match=r"no optimizer of er\.epochs\(\) has taken a step"):
        for _ in job.epochs():
            list(job.loader)


def test_streams_and_global_batches_need_no_sampler(begin: Begin) -> None:
    """Their loaders just work."""
    job = begin()
    stream = er.ShardedStream(["a", "b"], lambda _: iter(range(6)), batch_size=3)
    for _ in job.epochs(data=stream, run_id="stream"):
        for batch in stream:
            job.train(batch)
    assert job.at == (2, 0, 8)
    job = begin()
    numbers: Any = list(range(10))
    loader: DataLoader[Any] = DataLoader(numbers, batch_sampler=er.GlobalBatches(10, 4, micro_batch=2))
    for _ in (epochs := job.epochs(data=loader, run_id="global")):
        for _ in epochs.run.micro_batches(loader):
            if epochs.run.last_micro_batch:
                job.optimizer.step()
    assert job.at == (2, 0, 6)


class Unreadable(nn.Module):
    """A module of the script, such as one that is built later, whose parameters cannot be listed."""

    is_open = False

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Fail, at first or later."""
        if not self.is_open:
            raise RuntimeError("not built yet")
        return super().named_parameters(*args, **kwargs)


@pytest.mark.parametrize("fails_at_once", [True, False])
def test_check_that_fails_ends_no_job(begin: Begin, fails_at_once: bool) -> None:
    """It only warns, on one rank, and the others would wait."""
    job, module = begin(), Unreadable()
    module.register_buffer("counts", torch.zeros(3))
    module.is_open = not fails_at_once
    steps = er.steps(6, **job.arguments())
    job.run = steps.run
    for step in steps:
        job.train(torch.tensor([step]))
        module.is_open = False
    assert steps.run.position.step == 6
