"""An epoch has one order of samples, for any world, failures and prefetching."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from elastic_resume.checkpoint.manifest import Position
from elastic_resume.data.batch_size import compute_share
from elastic_resume.data.elastic_sampler import ElasticSampler, find_batches
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.errors import ConfigError, MismatchError, UsageError
from tests.support.datasets import NumberDataset

WORLDS = st.integers(1, 9)


def placed(batches: GlobalBatches, rank: int, world: int, epoch: int = 0, step: int = 0) -> GlobalBatches:
    """Bind and seek in one line."""
    batches.bind(rank, world)
    batches.seek(epoch, step)
    return batches


# ---- shares ------------------------------------------------------------------------------------------


@given(st.integers(0, 10**12), WORLDS)
def test_shares_cover_batch_without_gap_or_overlap(samples: int, world: int) -> None:
    """Every sample of a batch is in one share only. The first ranks get the extra samples."""
    shares = [compute_share(samples, rank, world) for rank in range(world)]
    assert (shares[0].start, shares[-1].stop) == (0, samples)
    assert all(left.stop == right.start for left, right in itertools.pairwise(shares))
    extra = samples % world
    assert [len(share) - samples // world for share in shares] == [1] * extra + [0] * (world - extra)


@given(st.integers(1, 60), st.integers(1, 20), WORLDS, st.booleans())
def test_share_is_never_empty_and_within_batch(size: int, batch: int, world: int, shuffle: bool) -> None:
    """Every rank must take part in the all-reduce."""
    batches = GlobalBatches(size, batch, shuffle=shuffle)
    for step in range(len(batches)):
        whole = next(iter(placed(batches, 0, 1, 0, step)))
        for rank in range(world):
            mine = next(iter(placed(batches, rank, world, 0, step)))
            share = batches.share(step)
            assert mine
            assert mine == whole[share.start : share.stop]


# ---- one order, each sample once ---------------------------------------------------------------------


def test_order_differs_by_epoch_and_seed() -> None:
    """(seed, epoch) is mixed, not added: (0, 1) and (1, 0) differ."""
    orders = {
        tuple(itertools.chain(*placed(GlobalBatches(50, 7, seed=seed), 0, 1, epoch)))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_order_is_pinned() -> None:
    """A torch release with another permutation would repeat and skip samples."""
    assert list(placed(GlobalBatches(10, 10, seed=3), 0, 1, epoch=2)) == [[4, 2, 8, 0, 3, 6, 1, 5, 7, 9]]


def test_order_without_shuffle_is_dataset_order() -> None:
    """The last batch is partial, or dropped."""
    assert list(GlobalBatches(7, 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(GlobalBatches(7, 3, shuffle=False, drop_last=True)) == [[0, 1, 2], [3, 4, 5]]


# ---- iterators ---------------------------------------------------------------------------------------


def test_concurrent_iterators_are_independent() -> None:
    """Start, rank and order are fixed when iter() is called."""
    batches = GlobalBatches(20, 6)
    expected_first = list(placed(batches, 0, 2))
    expected_second = list(placed(batches, 1, 3, epoch=1, step=2))
    first = iter(placed(batches, 0, 2))
    begun = [next(first)]
    second = iter(placed(batches, 1, 3, epoch=1, step=2))
    batches.bind(2, 3)
    batches.seek(9, 0)
    rest = list(second)
    assert begun + list(first) == expected_first
    assert rest == expected_second


@pytest.mark.parametrize("step", [3, 4])
def test_length_is_whole_epoch_after_seek(step: int) -> None:
    """A progress bar counts to the end of the epoch. Step 4 is the end: nothing is left to read."""
    batches = placed(GlobalBatches(20, 6), 0, 1, epoch=0, step=step)
    assert (len(batches), len(list(batches))) == (4, 4 - step)


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_loader_yields_same_batches(workers: int) -> None:
    """The loader reads ahead; the position does not move."""
    batches = placed(GlobalBatches(40, 6), 1, 2, epoch=1, step=2)
    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 3} if workers else {}
    loader = DataLoader(NumberDataset(40), batch_sampler=batches, num_workers=workers, **options)
    expected = list(batches)
    interrupted = iter(loader)
    next(interrupted)
    assert [batch.tolist() for batch in loader] == expected
    batches.seek(2, 0)
    expected = list(batches)
    assert [batch.tolist() for batch in loader] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_request_callback_undoes_loader_draws(workers: int) -> None:
    """A step draws the same numbers whether it is the loader's first or a later one."""
    batches = GlobalBatches(40, 6)
    position = 0

    def seed_step(first: bool = True) -> None:
        if first:
            torch.manual_seed(position)

    def drawn(start: int) -> Iterator[float]:
        nonlocal position
        position = start
        batches.bind(0, 1, on_batch_request=seed_step)
        batches.seek(0, start)
        for _ in DataLoader(NumberDataset(40), batch_sampler=batches, num_workers=workers):
            yield torch.rand(()).item()
            position += 1
            seed_step()

    assert list(drawn(0))[3:] == list(drawn(3))


@pytest.mark.parametrize("start", [5, 7])
def test_batch_request_callback_is_called_for_every_batch_and_at_the_end(start: int) -> None:
    """Also when nothing is left of the epoch."""
    told: list[bool] = []
    batches = GlobalBatches(40, 6)
    batches.bind(0, 1, on_batch_request=told.append)
    batches.seek(0, start)
    assert len(list(batches)) == 7 - start
    assert told == [True] + [False] * (7 - start)


# ---- loss weight -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_averaged_gradient_equals_gradient_of_one_process(world: int) -> None:
    """Each rank's gradient of its weighted mean loss, averaged in float64 as DDP does."""
    inputs = torch.randn(25, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batches = GlobalBatches(25, 10)  # a partial last batch of 5, fewer than 7 ranks

    def gradient(indices: list[int], weight: float) -> torch.Tensor:
        parameters = torch.ones(4, dtype=torch.float64, requires_grad=True)
        loss = (inputs[indices] @ parameters).tanh().square().mean() * weight
        return torch.autograd.grad(loss, parameters)[0]

    for step in range(len(batches)):
        whole = gradient(next(iter(placed(batches, 0, 1, 0, step))), 1.0)
        shares = []
        for rank in range(world):
            mine = next(iter(placed(batches, rank, world, 0, step)))
            shares.append(gradient(mine, batches.loss_weight(step)))
        torch.testing.assert_close(torch.stack(shares).mean(0), whole, rtol=1e-12, atol=1e-14)


def test_rank_without_share_reads_sample_with_zero_weight() -> None:
    """Two samples and five ranks: three ranks read a sample that another rank counts."""
    batches = GlobalBatches(2, 5, shuffle=False)
    read = [next(iter(placed(batches, rank, 5))) for rank in range(5)]
    weights = [placed(batches, rank, 5).loss_weight(0) for rank in range(5)]
    assert read == [[0], [1], [0], [1], [0]]
    assert weights == [2.5, 2.5, 0.0, 0.0, 0.0]


# ---- identity ----------------------------------------------------------------------------------------


def test_load_refuses_other_order_and_lists_differences() -> None:
    """The error lists each difference and the remedy."""
    saved = GlobalBatches(10, 4, seed=2).state_dict()
    batches = GlobalBatches(10, 5, seed=2, shuffle=False)
    with pytest.raises(MismatchError) as caught:
        batches.load_state_dict(saved)
    text = str(caught.value)
    assert "global_batch is 5 here, 4 in the checkpoint" in text
    assert "shuffle is False here, True in the checkpoint" in text
    assert "seed" not in text
    assert "--resume never" in text


# ---- libraries ---------------------------------------------------------------------------------------


def test_libraries_recognise_both_kinds_of_sampler() -> None:
    """They leave a BatchSampler and a DistributedSampler in place, and read these attributes."""
    batches = placed(GlobalBatches(10, 4, micro_batch=1), 1, 3)
    sampler = ElasticSampler(range(10), num_replicas=3, rank=1)
    assert isinstance(batches, BatchSampler)
    assert isinstance(sampler, DistributedSampler)
    assert (batches.batch_size, batches.drop_last, len(batches.sampler)) == (1, False, 10)
    assert (sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size) == (3, 1, 4, 12)


def test_rank_and_world_are_known_before_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torchrun's environment: a schedule asks for the length early."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert list(GlobalBatches(2, 2, shuffle=False)) == [[0, 1]], "no torchrun has set these"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert list(GlobalBatches(8, 8, shuffle=False)) == [[2, 3]]
    assert len(GlobalBatches(8, 8, micro_batch=1)) == 2
    assert len(ElasticSampler(range(8))) == 2
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(ConfigError, match="RANK is 4 and WORLD_SIZE 4"):
        list(GlobalBatches(8, 8))


class Shard(BatchSampler):
    """What Accelerate puts around a batch sampler: each rank reads every second of its batches."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        super().__init__(range(3), 1, drop_last=False)
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), 0, None, 2)


@pytest.mark.parametrize(
    "inside", [GlobalBatches(10, 4), BatchSampler(ElasticSampler(range(10)), 2, drop_last=False)]
)
def test_second_sharding_is_refused(inside: BatchSampler) -> None:
    """Half of the samples would never be read."""
    loader: DataLoader[int] = DataLoader(NumberDataset(10), batch_sampler=Shard(inside))
    with pytest.raises(ConfigError, match=r"a Shard around its batches\. .*accelerator\.prepare"):
        find_batches(loader)


@pytest.mark.filterwarnings("ignore")  # those of the library
@pytest.mark.parametrize("dispatch", [False, True])
def test_prepared_loader_is_refused_in_a_single_process(*, dispatch: bool) -> None:
    """Accelerate puts nothing around the batches there, but sets the sampler's epoch, or reads for all."""
    from accelerate.data_loader import prepare_data_loader  # noqa: PLC0415  seconds

    loader = DataLoader(NumberDataset(10), batch_size=2, sampler=ElasticSampler(range(10)))
    prepared = prepare_data_loader(
        loader, torch.device("cpu"), 1, 0, put_on_device=True, dispatch_batches=dispatch
    )
    with pytest.raises(ConfigError, match=r"of Accelerate.* Leave the loader out of accelerator\.prepare"):
        find_batches(prepared)


def test_loop_cannot_skip_steps_of_another_world() -> None:
    """Their batches are in no order of this world."""
    batches = GlobalBatches(24, 4)
    batches.bind(0, 2, policy="keep_local_batch")
    state = batches.state_dict()
    smaller = GlobalBatches(24, 4)
    smaller.bind(0, 1, policy="keep_local_batch")
    smaller.load_state_dict(state)
    smaller.begin_generation(Position(0, 2, 2, 8), 2)
    with pytest.raises(UsageError, match="changed after step 2 of epoch 0"):
        smaller.seek_start(0)
    smaller.seek_start(1)


# ---- wrong use ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dataset_size": 0}, "dataset_size must be an integer of at least 1, got 0"),
        ({"dataset_size": -3}, "dataset_size"),
        ({"dataset_size": True}, "dataset_size .* got True"),
        ({"dataset_size": 10.0}, "dataset_size .* got 10.0"),
        ({"dataset_size": None}, "dataset_size .* got None"),
        ({"dataset_size": NumberDataset(3)}, r"dataset_size .* got a NumberDataset; pass len\(dataset\)"),
        ({"global_batch": 0}, "global_batch must be an integer of at least 1, got 0"),
        ({"global_batch": "8"}, "global_batch .* got '8'"),
        ({"seed": 1.5}, "seed .* got 1.5"),
        ({"seed": 2**63}, "seed"),
        ({"shuffle": 1}, "shuffle must be True or False, got 1"),
        ({"drop_last": "no"}, "drop_last must be True or False, got 'no'"),
        ({"dataset_size": 3, "drop_last": True}, "an epoch without a step: dataset_size 3"),
    ],
)
def test_wrong_argument_is_refused_by_name(arguments: dict[str, Any], text: str) -> None:
    """The error has the name, the bound and the value."""
    with pytest.raises(ConfigError, match=text):
        GlobalBatches(**{"dataset_size": 10, "global_batch": 4, **arguments})


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0), (True, 2)])
def test_bind_refuses_rank_outside_world(rank: int, world: int) -> None:
    """Its share would be read by nobody."""
    with pytest.raises(ConfigError, match=r"rank|world_size"):
        GlobalBatches(10, 4).bind(rank, world)


@pytest.mark.parametrize(("epoch", "step"), [(0, 4), (0, -1), (-1, 0), (0, 1.0)])
def test_seek_outside_epoch_is_refused_and_changes_nothing(epoch: int, step: int) -> None:
    """The previous position stays."""
    batches = placed(GlobalBatches(10, 4), 0, 1, epoch=1, step=2)
    before = list(batches)
    with pytest.raises(ConfigError, match=r"epoch|step_in_epoch"):
        batches.seek(epoch, step)
    assert list(batches) == before
