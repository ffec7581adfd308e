"""A stream's batches in worlds of threads, in loader processes, and in a run of this process."""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import elastic_resume as er
from elastic_resume.checkpoint import json_codec
from elastic_resume.data.sharded_stream import ShardedStream
from elastic_resume.errors import ConfigError, MismatchError, UsageError
from tests.support.thread_ranks import ThreadCollectives, run_ranks

SIZES = [5, 0, 9, 1, 12, 3, 7, 7, 2, 10, 4, 6]
EVERY = sorted((shard, n) for shard, size in enumerate(SIZES) for n in range(size))
Sample = tuple[int, int]


def read(shard: int) -> list[Sample]:
    """Return the samples of one shard."""
    return [(shard, number) for number in range(SIZES[shard])]


def read_from(shard: int, start: int) -> list[Sample]:
    """Begin at a sample."""
    return read(shard)[start:]


def make(batch_size: int = 2, **more: Any) -> ShardedStream:
    """Make a stream of lists of samples."""
    options: dict[str, Any] = {"seed": 3, "collate_fn": list, **more}
    return ShardedStream(range(len(SIZES)), options.pop("read", read), batch_size, **options)


class Step(NamedTuple):
    """One rank's part of a step."""

    batch: Any
    weight: float


def train(
    size: int,
    state: dict[str, Any] | None = None,
    steps: int = 1000,
    epoch: int = 0,
    make_stream: Callable[[], ShardedStream] = make,
) -> tuple[list[list[Step]], dict[str, Any]]:
    """Count so many steps on each rank, and take one batch more; return them by rank, and the state."""

    def run(collectives: ThreadCollectives) -> tuple[list[Step], dict[str, Any]]:
        stream, found = make_stream(), list[Step]()
        stream.bind(collectives, lambda _: None, lambda: None)
        if state is not None:
            stream.load_state_dict(json_codec.decode(json.loads(json.dumps(json_codec.encode(state)))))
        stream.start_epoch(epoch)
        for batch in stream:
            if len(found) == steps:
                break
            found.append(Step(batch, stream.loss_weight))
            stream.count_step()
        return found, stream.state_dict()

    results = run_ranks(size, run)
    assert all(state == results[0][1] for _, state in results)
    assert len({len(found) for found, _ in results}) == 1, "the ranks ended apart"
    return [found for found, _ in results], results[0][1]


def counted(ranks: list[list[Step]]) -> list[Sample]:
    """Return the samples with a weight."""
    return [sample for steps in ranks for step in steps if step.weight for sample in step.batch]


# ---- worlds ------------------------------------------------------------------------------------------------


def test_world_of_changing_size_reads_each_sample_once() -> None:
    """4 -> 3 -> 2 -> 5 ranks; a batch that was taken and not counted is read again."""
    found: list[Sample] = []
    state = None
    for size, steps in ((4, 2), (3, 1), (2, 3), (5, 1000)):
        ranks, state = train(size, state, steps)
        found += counted(ranks)
    assert sorted(found) == EVERY


@pytest.mark.parametrize("reader", [read, read_from])
def test_resumed_world_of_same_size_reads_same_batches(reader: Callable[..., Any]) -> None:
    """Bit for bit, also the fillers."""
    whole, _ = train(3, make_stream=lambda: make(read=reader))
    for steps in range(len(whole[0]) + 1):
        before, state = train(3, None, steps, make_stream=lambda: make(read=reader))
        after, _ = train(3, state, make_stream=lambda: make(read=reader))
        assert [a + b for a, b in zip(before, after, strict=True)] == whole


def test_weights_make_the_mean_exact_and_fillers_count_nothing() -> None:
    """A rank without samples gets a batch of its own copy, also if it never had one."""
    ranks, _ = train(5, make_stream=lambda: ShardedStream([[6.0] * 7, [1.0, 2.0]], list, 2))
    assert len(ranks[0]) == 4
    for step in zip(*ranks, strict=True):
        samples = [sample for part in step if part.weight for sample in part.batch.tolist()]
        mean = sum(part.weight * part.batch.mean().item() for part in step) / len(ranks)
        assert mean == pytest.approx(sum(samples) / len(samples))
        assert all(part.batch.numel() for part in step)
    idle = [step for steps in ranks for step in steps if not step.weight]
    assert len(idle) == 5 * 4 - 5
    assert len({id(step.batch) for step in idle}) == len(idle), "a script may change its batch"


def test_filler_is_the_same_in_each_epoch() -> None:
    """BatchNorm sees it, and a restart may come in a later epoch than the first filler."""
    found = set()
    for epoch in range(3):
        ranks, _ = train(3, epoch=epoch, make_stream=lambda: ShardedStream([[1] * 9, [2, 3]], list, 2))
        found.add(str([step.batch for step in ranks[2]][:1]))
    assert len(found) == 1


def test_epochs_have_other_orders_and_all_samples() -> None:
    """The order follows seed and epoch; without shuffle it is that of the shards."""
    orders = [counted(train(1, epoch=epoch)[0]) for epoch in range(3)]
    assert all(sorted(order) == EVERY for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert counted(train(1, make_stream=lambda: make(seed=4))[0]) not in orders
    assert counted(train(1, make_stream=lambda: make(shuffle=False))[0]) == EVERY


# ---- loader processes, random numbers --------------------------------------------------------------------


def read_randomly(shard: int) -> Iterator[tuple[Sample, float]]:
    """Read in random order, and draw for each sample."""
    order = read(shard)
    random.shuffle(order)
    for sample in order:
        yield sample, torch.rand(()).item() + random.random() + np.random.rand()  # noqa: NPY002


def read_share(shard: int) -> Iterator[Sample]:
    """Leave out the samples of other workers, as the package datasets does."""
    info = torch.utils.data.get_worker_info()
    yield from read(shard)[info.id :: info.num_workers] if info else read(shard)


@pytest.mark.slow
@pytest.mark.parametrize("reader", [read_share, lambda shard: list(read_share(shard))])
def test_reader_that_divides_shard_among_workers_reads_all_of_it(reader: Callable[[int], Any]) -> None:
    """A shard belongs to one worker, which the reader does not see."""
    whole, _ = train(1, make_stream=lambda: make(3, read=reader, num_workers=2))
    assert sorted(counted(whole)) == EVERY


@pytest.mark.slow
def test_random_numbers_and_batches_are_same_in_workers_and_after_resume() -> None:
    """The loader's worker whose turn it is reads on; the script's own numbers stay as they are."""
    numbers: dict[int, dict[Any, Any]] = {}
    for workers in (0, 1, 2):
        torch.manual_seed(1)
        before = torch.get_rng_state()

        def build(workers: int = workers) -> ShardedStream:
            return make(3, read=read_randomly, num_workers=workers)

        whole, _ = train(1, make_stream=build)
        assert torch.equal(torch.get_rng_state(), before)
        numbers[workers] = dict(counted(whole))
        assert sorted(numbers[workers]) == EVERY
        for steps in (1, 4, 9):
            random.seed(steps)
            first, state = train(1, None, steps, make_stream=build)
            rest, _ = train(1, state, make_stream=build)
            assert first[0] + rest[0] == whole[0]
    assert numbers[0] == numbers[1] == numbers[2]


# ---- what is refused and said -----------------------------------------------------------------------------


def test_skipped_samples_are_logged_once_per_resume(caplog: pytest.LogCaptureFixture) -> None:
    """By rank 0, and only if read() cannot skip by itself."""
    caplog.set_level(logging.INFO)
    _, state = train(2, None, 3)
    assert not caplog.messages
    train(2, state, make_stream=lambda: make(read=read_from))
    assert not caplog.messages
    train(3, state)
    (message,) = caplog.messages
    read_by_lane = [int(lane.split(":")[1]) for lane in state["progress"]["lanes"].split()]
    begun = [samples for samples in read_by_lane if samples]
    assert f"{sum(begun)} samples of {len(begun)} begun shard" in message


def test_too_few_shards_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The other ranks train with a weight of 0.0."""
    train(3, make_stream=lambda: ShardedStream([[1, 2]], list, 2))
    assert "1 shard for 3 ranks, so 2 of them read nothing" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_shard_that_has_lost_samples_is_refused(workers: int) -> None:
    """Its lost samples would be left out of the epoch without a word. Other shards may have changed."""

    def build(sizes: list[int]) -> Callable[[], ShardedStream]:
        return lambda: make(3, read=lambda shard: read(shard)[: sizes[shard]], num_workers=workers)

    first, state = train(1, None, 9, make_stream=build(SIZES))
    last, number = first[0][-1].batch[-1]
    for size in (number + 1, number):
        sizes = [*SIZES[:last], size, *SIZES[last + 1 :]]
        if size > number:
            train(1, state, make_stream=build(sizes))
            continue
        with pytest.raises(MismatchError, match=rf"shard {last} \({last}\) has {number} sample"):
            train(1, state, make_stream=build(sizes))


@pytest.mark.slow
def test_streams_that_differ_between_ranks_are_refused() -> None:
    """Such as files in the order in which each machine lists them."""
    orders = iter((["a/1", "a/2"], ["a/2", "a/1"]))
    with pytest.raises(ConfigError, match=r"names is .* on rank 0 and .* on rank 1.*sort the names"):
        train(2, make_stream=lambda: ShardedStream(next(orders), open, 2))
    workers = iter((0, 2))
    with pytest.raises(ConfigError, match=r"num_workers is .* on rank 0"):
        train(2, make_stream=lambda: make(num_workers=next(workers)))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"shards": []}, "number of shards must be an integer from 1"),
        ({"read": "x"}, "read must be a function"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"num_workers": -1}, "num_workers must be"),
        ({"seed": 0.5}, "seed must be"),
        ({"shuffle": 1}, "shuffle must be"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    """When the stream is made."""
    with pytest.raises(ConfigError, match=text):
        ShardedStream(**{"shards": range(3), "read": read, "batch_size": 2, **arguments})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"seed": 4}, "seed is 4 here, 3 in the checkpoint"),
        ({"shuffle": False}, "shuffle is False here"),
        ({"shards": ["x/a", "x/b"]}, "shards is 2 here, 3 in"),
        ({"shards": ["x/a", "x/c", "x/b"]}, "names is"),
    ],
)
def test_checkpoint_of_other_shards_is_refused(arguments: dict[str, Any], text: str) -> None:
    """Another directory of the same files is none."""
    given: dict[str, Any] = {"shards": ["x/a", "x/b", "x/c"], "read": open, "batch_size": 2, "seed": 3}
    state = ShardedStream(**given).state_dict()
    ShardedStream(**{**given, "shards": [Path("/y/z/a"), "/y/z/b", "/y/z/c"]}).load_state_dict(state)
    with pytest.raises(MismatchError, match=text):
        ShardedStream(**{**given, **arguments}).load_state_dict(state)


# ---- runs -------------------------------------------------------------------------------------------------

Begin = Callable[..., tuple[ShardedStream, er.Run]]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Start runs on one directory, each after the release of the last."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    runs: list[er.Run] = []

    def build(stream: ShardedStream | None = None, **more: Any) -> tuple[ShardedStream, er.Run]:
        for run in runs:
            run._release()
        stream = stream or make()
        names: dict[str, Any] = {"ckpt_dir": tmp_path, "run_id": "job", "node_name": "n"}
        runs.append(er.resume(model=nn.Linear(1, 1), data=stream, **names, **more))
        return stream, runs[-1]

    yield build
    for run in runs:
        run._release()


def test_interrupted_epoch_resumes_at_next_sample(begin: Begin) -> None:
    """A batch that was taken before the save and not counted is read again."""
    found: list[Sample] = []
    stream, run = begin()
    for _ in run.epochs(1):
        for batch in stream:
            if run.position.step_in_epoch == 5:
                break
            found += batch
            run.step()
        run.save()
        break
    assert (run.position.samples, run.loss_weight) == (len(found), 1.0)
    stream, run = begin()
    assert (run.position.step_in_epoch, run.position.samples) == (5, len(found))
    for _ in run.epochs(1):
        for batch in stream:
            found += batch
            run.step()
    assert sorted(found) == EVERY
    assert (run.position.epoch, run.position.samples) == (1, len(EVERY))


@pytest.mark.parametrize("saved", ["at the last step", "after the loop", "after the epoch"])
def test_resume_after_last_batch_does_the_rest_of_the_epoch_once(begin: Begin, saved: str) -> None:
    """A save at the last step leaves the epoch's other work to do; a later save includes it."""
    stream, run = begin()
    run.begin_epoch()
    for _ in stream:
        run.step()
        if saved == "at the last step":
            run.save()
    if saved == "after the epoch":
        run.end_epoch()
    if saved != "at the last step":
        run.save()
    stream, run = begin()
    found = [(epoch, take_all(stream, run)) for epoch in run.epochs(3)]
    rest = [(0, 0)] if saved == "at the last step" else []
    assert found == [*rest, (1, len(EVERY)), (2, len(EVERY))]


def test_stream_of_an_earlier_run_in_this_process_begins_anew(begin: Begin) -> None:
    """A later cell of a notebook may call resume again, with the same stream."""
    stream, run = begin()
    for _ in run.epochs(1):
        next(iter(stream))
        run.step()
        break
    _, run = begin(stream, resume="never")
    assert [take_all(stream, run) for _ in run.epochs(1)] == [len(EVERY)]


def take_all(stream: ShardedStream, run: er.Run) -> int:
    """Count a step for each batch; return the number of samples."""
    taken = 0
    for batch in stream:
        taken += len(batch)
        run.step()
    return taken


def test_samples_without_a_step_are_refused_or_named(
    begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without any call of run.step() nothing is saved; a few batches at the end may be kept gradients."""
    stream, run = begin()
    with pytest.raises(UsageError, match=r"run\.step\(\) was never called"):
        [list(stream) for _ in run.epochs(1)]
    stream, run = begin(resume="never")
    for _ in run.epochs(2):
        for index, _ in enumerate(stream):
            if index % 4 == 3 or run.position.epoch:
                run.step()
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "came after its last" in line)
    assert re.search(rf"WARNING: {len(EVERY) % 8} samples of epoch 0 came after its last run\.step\(\)", line)


def test_loop_within_the_loop_is_refused(begin: Begin) -> None:
    """It would count samples twice, and a restart would leave out the rest of the epoch."""
    stream, run = begin()
    for _ in run.epochs(1):
        for _ in stream:
            with pytest.raises(UsageError, match="read by a second loop within the first one"):
                next(iter(stream))
            break
        next(iter(stream))
        assert take_all(stream, run) == len(EVERY), "a loop that was left is no second one"


@pytest.mark.parametrize("option", [{"in_order": False}, {"drop_last": True}, {"generator": None}])
def test_options_that_decide_the_order_are_refused(option: dict[str, Any]) -> None:
    """The first would leave out shards without a word."""
    with pytest.raises(ConfigError, match=f"cannot take {next(iter(option))}"):
        er.ShardedStream([1, 2], range, 2, **option)


def test_wrong_use_is_refused(begin: Begin) -> None:
    """Each of these would skip samples or epochs without a word."""
    with pytest.raises(UsageError, match=r"read before er\.resume"):
        next(iter(make()))
    stream, run = begin()
    with pytest.raises(UsageError, match="a GlobalBatches or a loader"):
        run.upcoming_batches()
    with pytest.raises(UsageError, match="cannot read an epoch from its start"):
        run.begin_epoch(from_start=True)
    run.begin_epoch()
    for _ in stream:
        run.step()
    with pytest.raises(UsageError, match="epoch 0 of the ShardedStream is over"):
        next(iter(stream))
    with pytest.raises(ConfigError, match="'keep_global_batch', but a ShardedStream reads batch_size"):
        begin(on_world_change="keep_global_batch")
    with pytest.raises(ConfigError, match="other: a run keeps its place in one order of samples"):
        begin(track={"other": make()})
    begin(on_world_change="keep_local_batch")
