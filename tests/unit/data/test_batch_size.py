"""A changed number of ranks reads every sample of the epoch once, with the exact mean gradient."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import elastic_resume as er
from elastic_resume import constants
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.data import batch_size
from elastic_resume.data.elastic_sampler import ElasticSampler, check_no_per_rank_state, find_batches
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.errors import ConfigError, MismatchError, UsageError, WorldChangedError
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.training.progress import RunOptions, TrainingProgress
from tests.support import launch_ranks
from tests.support.datasets import NumberDataset
from tests.support.paths import SCRIPTS
from tests.support.scripts.worlds import SAMPLES

WORLDS = st.integers(1, 9)
JOB = SCRIPTS / "worlds.py"
KEEP_GLOBAL, KEEP_LOCAL = batch_size.KEEP_GLOBAL, batch_size.KEEP_LOCAL


# ---- real processes ----------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.slow
def test_three_two_four_ranks_read_each_sample_of_epoch_once(tmp_path: Path) -> None:
    """Successive starts on gloo; each step's gradient equals that of one process."""
    starts: list[list[dict[str, Any]]] = []  # what each rank of each start reports
    for world, steps in ((3, 9), (2, 8), (4, 0)):
        more = ["refuse"] if world == 2 else []
        done = launch_ranks.run_ranks(world, JOB, str(tmp_path), str(steps), *more)
        assert [process.returncode for process in done] == [0] * world, done[0].stderr
        starts.append([json.loads(process.stdout.splitlines()[-1]) for process in done])
    assert all("from 3 ranks, and this world has 2" in rank["refused"] for rank in starts[1])
    for kind in ("global", "local", "sampler"):
        steps_by_rank = [[rank[kind]["steps"] for rank in start] for start in starts]
        steps_taken = [step for start in steps_by_rank for rank in start for step in rank]
        counted = sorted(chain.from_iterable(step["counted"] for step in steps_taken))
        assert counted == list(range(SAMPLES)), kind
        assert max(step["error"] for step in steps_taken) < 1e-6
        passes = [[[len(step["sizes"]) for step in rank] for rank in start] for start in steps_by_rank]
        assert all(rank == start[0] for start in passes for rank in start), "all ranks do as many passes"
    global_changes: list[list[list[int]]] = [[], [[3, 2, 30, 30]], [[2, 4, 30, 30]]]
    local_changes: list[list[list[int]]] = [[], [[3, 2, 30, 20]], [[2, 4, 20, 40]]]
    assert [[rank["global"]["changes"] for rank in start] for start in starts] == [
        [changes] * len(start) for changes, start in zip(global_changes, starts, strict=True)
    ]
    assert [start[-1]["local"]["changes"] for start in starts] == local_changes
    assert starts[-1][0]["global"]["lr"] == 0.01
    assert starts[-1][3]["local"]["lr"] == pytest.approx(0.01 * 40 / 30, rel=1e-12), "as the hooks scaled it"
    assert max(size for rank in starts[1] for step in rank["global"]["steps"] for size in step["sizes"]) == 8


# ---- the same for any sizes --------------------------------------------------------------------------


class Epoch:
    """An epoch under a sequence of worlds; each world is a start of new processes."""

    def __init__(self, make: Callable[[int], list[GlobalBatches]], policy: str | None = None) -> None:
        """``make`` returns each rank's data for a world of that size."""
        self.make, self.policy = make, policy
        self.state: dict[str, Any] | None = None
        self.position = Position(0, 0, 0, 0)
        self.world = 0
        self.counted: list[int] = []
        self.batches: list[GlobalBatches] = []

    def start(self, world: int) -> list[int | None]:
        """Start a world; return the previous global batch of each rank."""
        self.batches = self.make(world)
        before = []
        for rank, batches in enumerate(self.batches):
            batches.bind(rank, world, policy=self.policy)
            if self.state is not None:
                batches.load_state_dict(json.loads(json.dumps(self.state)))
            before.append(
                batches.begin_generation(None if self.state is None else self.position, self.world or None)
            )
        self.world = world
        return before

    def read(self, steps: int, losses: Any) -> None:
        """Read some steps, and check that the mean over each is exact."""
        first = self.position.step_in_epoch
        last = min(first + steps, self.batches[0].steps)
        reads = [list(batches) for batches in self.batches]
        parts = [self.batches[0].parts(step) for step in range(first, self.batches[0].steps)]
        assert {len(read) for read in reads} == {sum(parts)}
        for step in range(first, last):
            mean, here = 0.0, []
            for read, batches in zip(reads, self.batches, strict=True):
                for part in range(batches.parts(step)):
                    indices, weight = read.pop(0), batches.loss_weight(step, part)
                    mean += weight * losses[indices].mean() / len(self.batches)
                    here += indices if weight > 0 else []
            assert mean == pytest.approx(losses[here].mean(), rel=1e-9)
            assert len(here) == self.batches[0].samples(step)
            self.counted += here
        self.position = Position(0, last, last, len(self.counted))
        states = [batches.state_dict() for batches in self.batches]
        assert all(state == states[0] for state in states), "nodes store the same"
        self.state = states[0]


STAGES = st.lists(st.tuples(WORLDS, st.integers(0, 5)), min_size=1, max_size=5)
SEEDS = st.integers(-(2**63), 2**63 - 1)
SIZES = st.tuples(st.integers(1, 60), st.integers(1, 20), SEEDS, st.booleans(), st.none() | st.integers(1, 5))


@settings(max_examples=60)
@given(SIZES, STAGES, st.sampled_from([None, KEEP_GLOBAL, KEEP_LOCAL]))
def test_any_sequence_of_worlds_counts_each_sample_once(
    sizes: tuple[int, int, int, bool, int | None], stages: list[tuple[int, int]], policy: str | None
) -> None:
    """Uneven shares, micro-batches, ranks without a share, partial batches; the mean over all is exact."""
    size, batch, seed, drop_last, micro = sizes
    losses = np.random.default_rng(1).uniform(1, 2, size)

    def make(world: int) -> list[GlobalBatches]:
        return [
            GlobalBatches(size, batch, seed, drop_last=drop_last, micro_batch=micro) for _ in range(world)
        ]

    epoch = Epoch(make, policy)
    largest = 0
    for world, steps in [*stages, (stages[0][0], 10**9)]:
        try:
            epoch.start(world)
        except ConfigError:
            assume(not drop_last)  # else it says that no batch is whole
            raise
        largest = max(largest, epoch.batches[0].global_batch)
        epoch.read(steps, losses)
    assert len(set(epoch.counted)) == len(epoch.counted)
    assert len(epoch.counted) == size or (drop_last and size - len(epoch.counted) < largest)
    if policy == KEEP_LOCAL:
        assert epoch.batches[0].global_batch == batch, "the first world again: the first batch again"


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 6), STAGES, st.booleans(), st.booleans())
def test_elastic_sampler_reads_each_sample_once_in_equal_batch_counts(
    size: int, batch: int, stages: list[tuple[int, int]], whole_batches: bool, equal_shares: bool
) -> None:
    """Through torch's own BatchSampler, with its drop_last and the sampler's."""
    losses = np.random.default_rng(1).uniform(1, 2, size)
    samplers: list[BatchSampler] = []

    def make(world: int) -> list[GlobalBatches]:
        data = [ElasticSampler(NumberDataset(size), seed=2, drop_last=equal_shares) for _ in range(world)]
        samplers[:] = [BatchSampler(one, batch, whole_batches) for one in data]
        found = [find_batches(SimpleNamespace(batch_sampler=one)) for one in samplers]
        return [one for one in found if one is not None]

    epoch = Epoch(make)
    dropped = 0
    for world, steps in [*stages, (stages[0][0], 10**9)]:
        try:
            epoch.start(world)
        except ConfigError:
            assume(not whole_batches and not equal_shares)  # else it says that too little is left
            raise
        for torchs, ours in zip(samplers, epoch.batches, strict=True):
            assert list(torchs) == list(ours), "what the loader makes of it are the shares"
            assert len(torchs) == len(ours)
        if equal_shares and not whole_batches:
            steps_left = range(epoch.position.step_in_epoch, epoch.batches[0].steps)
            assert all(one.loss_weight(step) == 1.0 for one in epoch.batches for step in steps_left)
        epoch.read(steps, losses)
        dropped = max(dropped, world * batch if whole_batches else world if equal_shares else 1)
    assert len(set(epoch.counted)) == len(epoch.counted)
    assert size - len(epoch.counted) < dropped


@given(st.integers(1, 40), WORLDS, st.booleans(), st.booleans())
def test_elastic_sampler_without_resume_has_length_of_torchs(
    size: int, world: int, shuffle: bool, drop_last: bool
) -> None:
    """All samples are read; the order is our own."""
    made: list[list[list[int]]] = []
    for kind in (ElasticSampler, DistributedSampler):
        kinds: Any = kind
        samplers = [kinds(NumberDataset(size), world, rank, shuffle, 3, drop_last) for rank in range(world)]
        for sampler in samplers:
            sampler.set_epoch(4)
        made.append([list(sampler) for sampler in samplers])
        if size >= world or not drop_last:
            assert [len(one) for one in made[-1]] == [len(sampler) for sampler in samplers]
    ours, theirs = made
    if size >= world or not drop_last:
        assert [len(one) for one in ours] == [len(one) for one in theirs]
    assert drop_last or {i for one in ours for i in one} == set(range(size))
    if not shuffle and (size >= world or not drop_last):
        assert ours == theirs


def test_set_epoch_shuffles_and_keeps_position() -> None:
    """A script calls set_epoch in a resumed epoch too, and may count epochs from any number."""
    sampler = ElasticSampler(NumberDataset(20))
    batches = sampler.attach(4, drop_last=False)
    batches.bind(0, 1)
    batches.begin_generation(Position(7, 2, 2, 8), 1)
    sampler.set_epoch(7)
    rest = list(sampler)
    assert len(rest) == 12
    batches.seek(7, 0)
    sampler.set_epoch(7)
    assert list(sampler)[8:] == rest
    sampler.set_epoch(107)
    assert list(sampler)[8:] != rest
    assert sorted(sampler) == list(range(20))


def make_loaders(world: int, batch: int = 8, size: int = 100, **options: Any) -> list[GlobalBatches]:
    """Return each rank's batches of a loader with an ElasticSampler."""
    found = []
    for _ in range(world):
        dataset = NumberDataset(size)
        sampler = ElasticSampler(dataset, batch_size=batch, **options)
        loader: DataLoader[int] = DataLoader(dataset, batch_size=batch, sampler=sampler)
        batches = find_batches(loader)
        assert batches is not None
        assert getattr(loader.batch_sampler, "sampler", None) is sampler
        found.append(batches)
    return found


@pytest.mark.parametrize("drop_last", [False, True])
def test_elastic_sampler_keeps_the_global_batch_of_its_first_world(drop_last: bool) -> None:
    """Steps of an epoch, and so a schedule, stay; each sample is read once, and the mean is exact."""
    epoch = Epoch(functools.partial(make_loaders, drop_last=drop_last))
    lengths = set()
    for world, steps in ((3, 1), (2, 2), (4, 1), (3, 10)):
        assert epoch.start(world) == [24 if epoch.state else None] * world
        lengths |= {len(batches) for batches in epoch.batches}
        lengths |= {-(-len(batches.sampler) // -(-24 // world)) for batches in epoch.batches}
        epoch.read(steps, np.arange(1.0, 101.0))
    assert lengths == {5}
    assert len(set(epoch.counted)) == len(epoch.counted) == (99 if drop_last else 100)


@pytest.mark.parametrize(
    ("policy", "batch", "options", "world", "expected"),
    [
        (None, 8, {}, 2, 24),
        (KEEP_GLOBAL, 8, {}, 2, 24),
        (KEEP_LOCAL, 8, {}, 2, 16),
        (None, 12, {}, 2, 24),  # a script that divides a global batch itself
        (None, 10, {}, 2, 20),  # another argument
        (None, 8, {"accumulate": 2}, 2, 32),
        (None, 8, {}, 30, 240),  # some ranks would have no sample of their own
    ],
)
def test_global_batch_of_another_world_follows_policy_and_script(
    policy: str | None, batch: int, options: dict[str, Any], world: int, expected: int
) -> None:
    """It is kept where each rank may read another number of samples."""
    epoch = Epoch(functools.partial(make_loaders, size=480, **options), policy)
    epoch.start(3)
    epoch.state, epoch.position = epoch.batches[0].state_dict(), Position(0, 2, 2, 48)
    epoch.make = functools.partial(make_loaders, size=480, batch=batch, **options)
    epoch.start(world)
    assert {batches.global_batch for batches in epoch.batches} == {expected}


def test_length_that_a_script_has_seen_before_resume_is_compared(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that was built from it may be wrong."""
    caplog.set_level("INFO", "elastic_resume")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    (first,) = make_loaders(1)
    first.bind(0, 3)
    first.begin_generation(None, None)
    for asks in (False, True):
        dataset = NumberDataset(100)
        loader: DataLoader[int] = DataLoader(dataset, batch_size=8, sampler=ElasticSampler(dataset))
        assert not asks or len(loader) == 7
        batches = find_batches(loader)
        assert batches is not None
        batches.bind(0, 2)
        batches.load_state_dict(first.state_dict())
        batches.begin_generation(Position(0, 1, 1, 24), 3)
        assert len(loader) == 5
        assert (
            any("len(loader) was 7 before er.resume(), and is 5" in text for text in caplog.messages) == asks
        )


def test_schedule_of_a_batch_that_cannot_stay_is_logged_in_the_first_world(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A change would otherwise show only when it has happened."""
    caplog.set_level("INFO", "elastic_resume")
    for options, policy, is_logged in (
        ({}, None, 0),
        ({"accumulate": 2}, None, 1),
        ({"accumulate": 2}, KEEP_LOCAL, 1),
    ):
        (batches,) = make_loaders(1, **options)
        batches.bind(0, 3, policy=policy)
        batches.begin_generation(None, None)
        assert (
            sum("a schedule that counts steps gets another length" in text for text in caplog.messages)
            == is_logged
        )


def test_sampler_with_divided_batch_size_keeps_global_batch() -> None:
    """batch_size=24 // world_size changes nothing for the optimizer, so nothing is refused."""

    def make(world: int) -> list[GlobalBatches]:
        return [ElasticSampler(NumberDataset(100)).attach(24 // world, drop_last=False) for _ in range(world)]

    epoch = Epoch(make, KEEP_GLOBAL)
    for world in (4, 2, 3):
        assert epoch.start(world) == [24 if epoch.state else None] * world
        epoch.read(1, np.ones(100))
    with pytest.raises(MismatchError, match=r"would be 20 .* and was 24 with 3 ranks"):
        epoch.start(5)


def test_script_may_compute_global_batch_from_world_size() -> None:
    """GlobalBatches(n, 8 * world_size) and GlobalBatches(n, 32) mean the same under keep_local_batch."""
    first = GlobalBatches(200, 32)
    first.bind(0, 4, policy=KEEP_LOCAL)
    first.begin_generation(None, None)
    for size in (24, 32):
        batches = GlobalBatches(200, size)
        batches.bind(0, 3, policy=KEEP_LOCAL)
        batches.load_state_dict(first.state_dict())
        assert batches.begin_generation(Position(0, 2, 2, 64), 4) == 32
        assert batches.global_batch == 24
    other = GlobalBatches(200, 30)
    other.bind(0, 3, policy=KEEP_LOCAL)
    with pytest.raises(MismatchError, match="global_batch is 30 here, 32 in the checkpoint"):
        other.load_state_dict(first.state_dict())


def test_policy_may_change_between_generations() -> None:
    """An old state without a policy, then keep_local_batch, then keep_global_batch."""
    epoch = Epoch(lambda world: [GlobalBatches(60, 12) for _ in range(world)])
    epoch.start(4)
    epoch.read(1, np.ones(60))
    assert epoch.state == {
        "dataset_size": 60,
        "global_batch": 12,
        "seed": 0,
        "shuffle": True,
        "drop_last": False,
    }
    epoch.policy = KEEP_LOCAL
    assert epoch.start(2) == [12, 12]
    assert epoch.batches[0].global_batch == 6
    epoch.read(2, np.ones(60))
    epoch.policy = KEEP_GLOBAL
    assert epoch.start(3) == [6] * 3
    assert epoch.batches[0].global_batch == 12
    epoch.read(10, np.ones(60))
    assert sorted(epoch.counted) == list(range(60))


def test_finished_epoch_stays_finished_after_world_change() -> None:
    """Samples left out by drop_last are not read by a world with smaller batches."""
    epoch = Epoch(lambda world: [GlobalBatches(50, 24, drop_last=True) for _ in range(world)], KEEP_LOCAL)
    epoch.start(4)
    epoch.read(2, np.ones(50))
    epoch.start(1)
    assert [list(batches) for batches in epoch.batches] == [[]]
    epoch.batches[0].seek(1, 0)
    assert epoch.batches[0].steps == 8


# ---- micro-batches -----------------------------------------------------------------------------------


def test_share_is_split_evenly_and_equally_often_on_all_ranks() -> None:
    """11 samples on 2 ranks, at most 4 in a pass: two passes on each rank."""
    for rank, sizes in ((0, [3, 3]), (1, [3, 2])):
        batches = GlobalBatches(11, 11, shuffle=False, micro_batch=4)
        batches.bind(rank, 2)
        assert [len(part) for part in batches] == sizes
        assert len(batches) == 2
        assert batches.steps == 1


def test_rank_with_fewer_samples_than_parts_reads_sample_with_zero_weight() -> None:
    """3 samples on 2 ranks, one in a pass: the second rank lacks one for the second pass."""
    batches = GlobalBatches(3, 3, shuffle=False, micro_batch=1)
    batches.bind(1, 2)
    assert list(batches) == [[2], [2]]
    assert [batches.loss_weight(0, part) for part in range(2)] == [2 / 3, 0.0]


def test_micro_batches_are_read_through_the_run() -> None:
    """Each micro-batch has its own weight; a loop that ignores the run would use wrong weights."""
    data = GlobalBatches(8, 4, micro_batch=2)
    data.bind(0, 1)
    counting = TrainingProgress(None, data, RunOptions(None, rng="derived"), Collectives(0, 1, None))
    counting.start_epoch()
    for wrong in (lambda: counting.loss_weight, lambda: counting.is_last_micro_batch, counting.finish_step):
        with pytest.raises(UsageError, match=r"for batch in run\.micro_batches\(loader\)"):
            wrong()
    reading = counting.read_micro_batches(range(4))
    next(reading)
    assert (counting.loss_weight, counting.is_last_micro_batch) == (0.5, False)
    with pytest.raises(UsageError, match="after 1 of the 2 micro-batches of step 1: call it when"):
        counting.finish_step()
    next(reading)
    assert counting.is_last_micro_batch
    with pytest.raises(UsageError, match="the 2 micro-batches of step 1 were read and"):
        next(reading)


# ---- a run alone in its world ------------------------------------------------------------------------


Begin = Callable[..., er.Run]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Start a run with some data, after closing the previous run."""
    monkeypatch.setattr("sys.excepthook", lambda *_: None)
    runs: list[er.Run] = []

    def start(data: Any, **more: Any) -> er.Run:
        for run in runs:
            run.close()
        model = nn.Linear(1, 1)
        runs.append(er.resume(model=model, data=data, ckpt_dir=tmp_path, run_id="job", **more))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def written_by(tmp_path: Path, world_size: int) -> None:
    """Rewrite the newest checkpoint as one of another world size."""
    path = max(tmp_path.glob("job/*/g*/manifest.json"))
    manifest = Manifest.parse(path.read_bytes())
    path.write_bytes(replace(manifest, world_size=world_size).to_bytes())


def test_run_refuses_two_orders_of_samples(begin: Begin) -> None:
    """Every rank would read all of the second one from its beginning."""
    with pytest.raises(ConfigError, match=r"other: a run keeps its place in one order of samples"):
        begin(GlobalBatches(8, 4), track={"other": GlobalBatches(8, 4)})
    with pytest.raises(ConfigError, match=r"data.a: a run keeps its place"):
        begin({"a": GlobalBatches(8, 4), "b": GlobalBatches(8, 4)})


def test_loader_left_in_mid_epoch_continues_at_training_position(begin: Begin) -> None:
    """After the last step of an epoch, a loader reads the whole epoch again."""
    batches = GlobalBatches(12, 2, shuffle=False)
    run = begin(batches)
    read: list[list[int]] = []
    for _ in run.epochs(2):
        for _ in range(2):
            for indices in batches:
                read.append(indices)
                run.step()
                if run.position.step_in_epoch == 3:
                    break
        assert [*chain(*read)] == [*range(12)] * (run.position.epoch + 1)
        assert [*chain(*batches)] == [*range(12)]


def test_world_change_hook_runs_once_for_each_change(begin: Begin, tmp_path: Path) -> None:
    """The writer of the checkpoint counts, not the last start, which may have saved nothing."""
    data = DataLoader(NumberDataset(24), batch_sampler=GlobalBatches(24, 6))
    begin(data).step()
    begin(data).close()
    written_by(tmp_path, 3)
    for _ in range(2):  # the first of them saves nothing
        run, heard = begin(data, on_world_change=KEEP_LOCAL), list[er.WorldChange]()
        run.on_world_change(heard.append)
        assert heard == []
        run._release()
        run._script_hooks.run()
        assert heard == [er.WorldChange(3, 1, 6, 2)]
        assert heard[0].factor == pytest.approx(1 / 3)
    begin(data, on_world_change=KEEP_LOCAL).step()
    run = begin(data, on_world_change=KEEP_LOCAL)
    assert run.world_change is None


def test_policy_error_refuses_change_and_keeps_checkpoint(begin: Begin, tmp_path: Path) -> None:
    """The error has both sizes and the remedy."""
    data = GlobalBatches(24, 6)
    begin(data).step()
    begin(data).close()
    written_by(tmp_path, 4)
    with pytest.raises(
        WorldChangedError, match=r"from 4 ranks, and this world has 1.*--nnodes N.*keep_global"
    ):
        begin(data, on_world_change="error")
    assert begin(data).world_change == er.WorldChange(4, 1, 6, 6)


def test_world_change_without_data_has_no_factor() -> None:
    """The global batch is unknown."""
    with pytest.raises(UsageError, match="as data= to resume"):
        _ = er.WorldChange(4, 3, None, None).factor


# ---- wrong use ---------------------------------------------------------------------------------------


class StatefulLoader(DataLoader[int]):
    """A loader like torchdata's."""

    loaded: dict[str, int]

    def state_dict(self) -> dict[str, int]:
        """Return one rank's state."""
        return {"read": 2}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load one rank's state."""
        self.loaded = state


def make_loader(**sampler_arguments: Any) -> DataLoader[int]:
    """Return a loader of four numbers in batches of two, with an ElasticSampler."""
    sampler = ElasticSampler(NumberDataset(4), **sampler_arguments)
    return DataLoader(NumberDataset(4), 2, sampler=sampler)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"data": DataLoader(NumberDataset(4), shuffle=True)}, "cannot be restored.*GlobalBatches"),
        ({"data": ElasticSampler(NumberDataset(4))}, "Pass its DataLoader"),
        ({"data": make_loader(batch_size=3)}, "batch_size=3, but its loader has batch_size=2"),
        ({"data": make_loader(num_replicas=4, rank=0)}, "made with num_replicas=4, but here it is 1"),
        ({"data": GlobalBatches(4, 2), "on_world_change": "keep"}, "use one of 'keep_global_batch', 'keep_l"),
        ({"data": None, "on_world_change": KEEP_LOCAL}, "without data= batches cannot be divided"),
    ],
)
def test_data_without_restorable_position_is_refused_with_advice(
    begin: Begin, arguments: dict[str, Any], text: str
) -> None:
    """At the start, not at the first resume."""
    with pytest.raises(ConfigError, match=text):
        begin(**arguments)


def test_stateful_loader_is_accepted_for_one_rank_only(
    begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    """A larger world gets advice on what to use instead."""
    loader = StatefulLoader(NumberDataset(4))
    begin(loader).step()
    begin(loader)
    assert loader.loaded == {"read": 2}
    assert "starts over" not in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match=r"StatefulLoader with a state of its own for each of 2 ranks.*Elastic"
    ):
        check_no_per_rank_state(loader, 2)


@pytest.mark.parametrize("kind", [DataLoader, StatefulLoader])
def test_any_loader_with_our_samplers_is_accepted(kind: Any) -> None:
    """The loader's own state is ignored."""
    batches = GlobalBatches(4, 2)
    assert find_batches(kind(NumberDataset(4), batch_sampler=batches)) is batches
    found = find_batches(
        kind(NumberDataset(4), batch_size=2, sampler=ElasticSampler(NumberDataset(4)), drop_last=True)
    )
    assert found is not None
    assert found.drop_last
    single = find_batches(kind(NumberDataset(4), batch_size=None, sampler=ElasticSampler(NumberDataset(4))))
    assert single is not None
    assert single.global_batch == 1


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["batches", "sampler"])
def test_torchdatas_loader_around_our_samplers_resumes(begin: Begin, kind: str) -> None:
    """StatefulDataLoader's own state is ignored."""
    stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    dataset, read = NumberDataset(40), list[int]()
    for steps in (3, 1000):
        if kind == "batches":
            loader = stateful(dataset, batch_sampler=GlobalBatches(40, 6), num_workers=1)
        else:
            loader = stateful(dataset, 3, sampler=ElasticSampler(dataset))
        run = begin(loader)
        assert run.position.step == (0 if steps == 3 else 3)
        for _ in run.epochs(1):
            for batch in loader:
                if run.position.step_in_epoch == steps:
                    break
                read += batch.tolist()
                run.step()
            break
    assert sorted(read) == list(range(40))


@pytest.mark.parametrize("is_fixed", [True, False])
def test_what_another_number_of_ranks_would_do_is_said_where_it_can_come(
    is_fixed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent knows whether --nnodes is one number."""
    monkeypatch.setenv(constants.ENV_FIXED_NODES, str(int(is_fixed)))
    batches = ElasticSampler(NumberDataset(24), batch_size=2, accumulate=2).attach(2, drop_last=False)
    batches.bind(0, 2)
    with caplog.at_level("INFO"):
        assert batches.begin_generation(None, None) is None
    assert ("with another number of ranks" in caplog.text) != is_fixed
