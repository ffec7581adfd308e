"""Random numbers are the same after a resume and for any number of loader workers."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

import elastic_resume as er
from elastic_resume.data import rng
from elastic_resume.data.elastic_sampler import find_batches
from elastic_resume.data.rng import SeededIndices
from elastic_resume.errors import ConfigError, UsageError
from tests.support import launch_ranks
from tests.support.scripts import augment
from tests.support.scripts.augment import LOADERS, SAMPLES, STEPS, Noisy

Sample = tuple[int, Tensor]


def batches_at(
    epoch: int = 0, step: int = 0, rank: int = 0, world: int = 1, seed: int = 3
) -> er.GlobalBatches:
    """Return batches that start at a position."""
    batches = er.GlobalBatches(SAMPLES, 7, seed=seed)
    batches.bind(rank, world)
    batches.seek(epoch, step)
    return batches


def read(loader: DataLoader[Sample]) -> list[list[Any]]:
    """Return index and digest of every sample of a loader."""
    return [sample for batch in loader for sample in augment.seen(batch)]


def host_state() -> list[Any]:
    """Return the state of all CPU generators."""
    name, words, *rest = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), random.getstate(), name, list(words), *rest]


# ---- whole runs --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_run_reads_same_tensors_as_undisturbed_run(tmp_path: Path) -> None:
    """With 0 and 2 workers on any rank: a sample is one tensor in an epoch."""
    script = Path(augment.__file__)

    def train(directory: str, size: int, *args: str) -> list[Any]:
        (tmp_path / directory).mkdir(exist_ok=True)
        return launch_ranks.run_ranks(size, script, str(tmp_path / directory), *args)

    def read_results(done: list[Any]) -> list[dict[str, Any]]:
        assert [process.returncode for process in done] == [0] * len(done), [p.stderr for p in done]
        return [json.loads(process.stdout.splitlines()[-1]) for process in done]

    def read_diary(directory: str, size: int, began: int) -> dict[tuple[int, int], Any]:
        """Return what each rank read, by rank and step."""
        found = {}
        for rank in range(size):
            file = tmp_path / directory / f"seen-{size}-{rank}-from-{began}.jsonl"
            lines = map(json.loads, file.read_text().splitlines())
            found.update({(rank, line["step"]): line for line in lines})
        return found

    kill_in, save_at = STEPS + 5, STEPS + 3
    assert save_at % 3 == 0
    undisturbed = read_results(train("undisturbed", 2))
    killed = train("killed", 2, "--save-at", str(save_at), "--kill-in", str(kill_in))
    assert -signal.SIGKILL in {process.returncode for process in killed}, [p.stderr for p in killed]
    shutil.copytree(tmp_path / "killed", tmp_path / "alone")
    resumed, alone = read_results(train("killed", 2)), read_results(train("alone", 1))
    assert {result["began"] for result in [*resumed, *alone]} == {save_at}

    whole = read_diary("undisturbed", 2, 0)
    assert len(whole) == 2 * 2 * STEPS
    before, after = read_diary("killed", 2, 0), read_diary("killed", 2, save_at)
    assert set(after) == {at for at in whole if at[1] >= save_at}
    assert before == {at: line for at, line in whole.items() if at in before}
    assert after == {at: line for at, line in whole.items() if at in after}
    assert [result["digest"] for result in resumed] == [result["digest"] for result in undisturbed]

    samples: dict[tuple[int, int], set[str]] = {}
    for line in [*whole.values(), *read_diary("alone", 1, save_at).values()]:
        shown = dict(zip(LOADERS, line["loaders"], strict=True))
        assert shown == dict.fromkeys(LOADERS, shown["0"])
        for index, digest in shown["0"]:
            samples.setdefault((line["epoch"], index), set()).add(digest)
    assert len(samples) == 2 * SAMPLES
    assert {len(digests) for digests in samples.values()} == {1}
    assert len(set.union(*samples.values())) == 2 * SAMPLES, "the epochs' noise is not the same"


# ---- samples -----------------------------------------------------------------------------------------


def test_seeded_samples_are_same_in_every_world_and_after_resume() -> None:
    """One rank from the beginning, three ranks, and a start in mid-epoch."""
    dataset = er.seeded(Noisy())
    whole = read(DataLoader(dataset, batch_sampler=batches_at(2)))
    assert len({digest for _, digest in whole}) == SAMPLES
    three = [
        sample
        for rank in range(3)
        for sample in read(DataLoader(dataset, batch_sampler=batches_at(2, rank=rank, world=3)))
    ]
    assert {tuple(sample) for sample in three} == {tuple(sample) for sample in whole}
    assert read(DataLoader(dataset, batch_sampler=batches_at(2, step=4))) == whole[28:]
    for other in (batches_at(1), batches_at(2, seed=4)):
        again = read(DataLoader(dataset, batch_sampler=other))
        assert not {digest for _, digest in again} & {digest for _, digest in whole}


def test_seeded_samples_are_same_with_elastic_sampler() -> None:
    """Batches of other sizes, made by the loader: the samples equal those of GlobalBatches."""
    dataset = er.seeded(Noisy())
    expected = sorted(read(DataLoader(dataset, batch_sampler=batches_at(2, seed=8))))
    sampler = er.ElasticSampler(dataset, seed=8)
    loader = DataLoader(dataset, batch_size=11, sampler=sampler, num_workers=1)
    sampler.set_epoch(2)
    assert sorted(read(loader)) == expected
    batches = find_batches(loader)
    assert batches is not None
    found = []
    for rank in range(3):
        batches.bind(rank, 3)
        batches.begin_generation(None, None)
        batches.seek(2, 0)
        found += read(loader)
    assert sorted(found) == expected
    one_by_one = er.ElasticSampler(dataset, seed=8)
    one_by_one.set_epoch(2)
    singles = [
        default_collate([sample]) for sample in DataLoader(dataset, batch_size=None, sampler=one_by_one)
    ]
    assert sorted(sample for batch in singles for sample in augment.seen(batch)) == expected
    unmarked = DataLoader(dataset, batch_size=11, sampler=er.ElasticSampler(Noisy(), seed=8))
    with pytest.raises(UsageError, match="ElasticSampler made from the seeded dataset"):
        read(unmarked)


def test_workers_read_same_samples_as_main_process() -> None:
    """Persistent workers over two epochs, one of them started in the middle."""
    batches = batches_at()
    # The round trip stands for a spawned worker, which unpickles its dataset.
    dataset = pickle.loads(pickle.dumps(er.seeded(Noisy())))  # noqa: S301
    wrapped = DataLoader(dataset, num_workers=2, persistent_workers=True, batch_sampler=batches)
    here = DataLoader(er.seeded(Noisy()), batch_sampler=batches)
    for epoch, step in [(0, 0), (1, 5)]:
        batches.seek(epoch, step)
        assert read(wrapped) == read(here)


def test_reading_does_not_change_generators_of_main_process() -> None:
    """Also after an error of the dataset."""
    loader = DataLoader(er.seeded(Noisy()), batch_sampler=batches_at())
    reading = iter(loader)
    before = host_state()
    next(reading)
    assert host_state() == before

    class Broken(Noisy):
        def __getitem__(self, index: int) -> Sample:
            super().__getitem__(index)
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        er.seeded(Broken()).__getitems__(SeededIndices([1], 0, 0))
    assert host_state() == before


def test_initial_seed_differs_by_sample() -> None:
    """The documentation recommends torch.initial_seed() in __getitem__."""

    class Own(Noisy):
        def __getitem__(self, index: int) -> Sample:
            return index, torch.tensor(np.random.default_rng(torch.initial_seed()).random(2))

    first, again = (read(DataLoader(er.seeded(Own()), batch_sampler=batches_at())) for _ in range(2))
    assert first == again
    assert len({digest for _, digest in first}) == SAMPLES


def test_seeded_dataset_ignores_getitems_of_inner_dataset() -> None:
    """A Subset reads whole batches; its samples still draw one by one."""
    subset = er.seeded(Subset(Noisy(), range(10, 20)))
    one, other = (subset.__getitems__(SeededIndices(indices, 0, 0)) for indices in ([3, 7], [7]))
    assert torch.equal(one[1][1], other[0][1])


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: er.seeded(Noisy())[3], "the index 3 without an epoch"),
        (lambda: next(iter(DataLoader(er.seeded(Noisy()), batch_size=4))), "a plain list of indices"),
        (
            lambda: next(iter(DataLoader(Subset(er.seeded(Noisy()), range(60)), batch_sampler=batches_at()))),
            "around all other wrappers",
        ),
    ],
)
def test_plain_index_is_refused(ask: Callable[[], object], text: str) -> None:
    """Unseeded samples would go unnoticed."""
    with pytest.raises(UsageError, match=text):
        ask()


def test_iterable_dataset_is_refused() -> None:
    """Its samples have no index."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ConfigError, match="IterableDataset, whose samples have no index"):
        er.seeded(Stream())
    assert isinstance(er.seeded(er.seeded(Noisy())).dataset, Noisy), "seeding twice is seeding once"


# ---- steps -------------------------------------------------------------------------------------------


def test_step_seeds_all_cpu_generators() -> None:
    """torch, numpy and random. Other words, or words in another order, give other numbers."""

    def draw(seed: int) -> tuple[float, ...]:
        rng.seed_all_generators(seed)
        return torch.rand(()).item(), float(np.random.rand()), random.random()  # noqa: NPY002

    words = [(1, 2, 3, 0), (1, 3, 2, 0), (2, 1, 3, 0), (1, 2, 3, 1)]
    draws = [draw(rng.mix_words(*each)) for each in words]
    assert torch.initial_seed() == rng.mix_words(*words[-1])
    assert [len(set(numbers)) for numbers in zip(*draws, strict=True)] == [4] * 3
    assert draw(rng.mix_words(*words[0])) == draws[0]


def test_ranks_have_different_seeds_at_each_step() -> None:
    """In the low 32 bits, which torch uses. Of 2**17 independent seeds about 2 pairs would collide."""
    first, second = (torch.Generator().manual_seed(seed) for seed in (5, 5 + (1 << 32)))
    assert torch.equal(torch.rand(4, generator=first), torch.rand(4, generator=second)), "it uses 32 bits"
    seeds = [rng.derive_seed(7, rank, 12345) for rank in range(1 << 17)]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert len({seed >> 32 for seed in seeds}) > len(seeds) * 0.99, "other generators use all bits"
    assert len({seeds[1], rng.derive_seed(8, 1, 12345), rng.derive_seed(7, 1, 12346)}) == 3


class Job:
    """A script that draws in its dataset, in its steps, after some steps and between epochs."""

    def __init__(self, directory: Path, workers: int) -> None:
        model = torch.nn.Linear(1, 1)
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        self.batches = er.GlobalBatches(SAMPLES, 20, seed=3)
        dataset = er.seeded(Noisy()) if workers else Noisy()
        self.loader = DataLoader(dataset, batch_sampler=self.batches, num_workers=workers)
        if directory.exists():
            self.draw()  # in another life of the script
        names: dict[str, Any] = {"run_id": "job", "node_name": "n", "save_every": 1000}
        self.run = er.resume(model=model, data=self.batches, ckpt_dir=directory, **names)

    def train(self, stop: int | None = None) -> dict[int, Any]:
        """Return the draws by step. With ``stop`` the job ends after a save of that step."""
        drawn: dict[int, Any] = {}
        run, step = self.run, self.run.position.step
        for _ in run.epochs(3):
            for batch in self.loader:
                drawn[step] = [augment.seen(batch), *self.draw()]
                step += 1
                run.step()
                if step == stop and step % 3:
                    run.save()
                    return drawn
                self.draw()
            drawn[-step] = self.draw()
            if step == stop:
                run.save()
                return drawn
        return drawn

    @staticmethod
    def draw() -> list[float]:
        """Draw from each generator."""
        return [torch.rand(()).item(), random.gauss(0, 1), float(np.random.normal())]  # noqa: NPY002


@pytest.mark.parametrize("stop", [4, 6])
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_script_draws_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, stop: int
) -> None:
    """Interrupted within an epoch and between two epochs."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    whole = Job(tmp_path / "whole", workers)
    expected = whole.train()
    assert len({str(drawn) for drawn in expected.values()}) == 12
    first = Job(tmp_path / "parts", workers)
    drawn = first.train(stop)
    first.run._release()
    second = Job(tmp_path / "parts", workers)
    assert second.run.position.step == stop
    rest = second.train()
    assert not set(drawn) & set(rest)
    assert drawn | rest == expected
    for job in (whole, second):
        job.run.close()


def test_epoch_starts_with_same_numbers_without_tracked_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script with a loader of its own; draws of an evaluation between epochs do not matter."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def epochs(directory: str, stop: int) -> dict[int, list[float]]:
        names: dict[str, Any] = {"run_id": "job", "node_name": "n", "save_every": 1000, "seed": 6}
        run = er.resume(model=torch.nn.Linear(1, 1), ckpt_dir=tmp_path / directory, **names)
        drawn = {}
        for epoch in run.epochs(3):
            if epoch == stop:
                break
            drawn[epoch] = Job.draw()
            run.step()
            Job.draw()
        run.close()
        return drawn

    whole = epochs("whole", 3)
    assert len({str(drawn) for drawn in whole.values()}) == 3
    assert epochs("parts", 1) | epochs("parts", 3) == whole
