"""Lanes read each sample of an epoch once, however often the world changes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from elastic_resume.checkpoint import json_codec
from elastic_resume.data.sharded_stream import ShardProgress, _LaneReader

Sample = tuple[int, int]


def stored(progress: ShardProgress) -> ShardProgress:
    """Return what a checkpoint gives back."""
    text = json.dumps(json_codec.encode(progress.to_state()))
    return ShardProgress.parse(json_codec.decode(json.loads(text)), progress.shards)


def make_lane_items(progress: ShardProgress, lane: int, sizes: list[int], batch: int) -> Any:
    """Return the iterator over what one lane reads."""
    entries = [(place, place, start) for place, start in progress.deal()[lane]]

    def read(shard: int) -> list[Sample]:
        return [(shard, number) for number in range(sizes[shard])]

    return iter(_LaneReader([entries], [progress.lanes[lane]], 0, read, list, batch, 0))


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 6)), max_size=6),
    batch=st.integers(1, 4),
    chooser=st.randoms(use_true_random=False),
)
def test_each_sample_is_counted_once(
    sizes: list[int], worlds: list[tuple[int, int, int]], batch: int, chooser: Any
) -> None:
    """Each world takes some steps, of any lane of each rank, and reads one more that is not counted."""
    progress, counted = ShardProgress(len(sizes)), []
    for ranks, workers, steps in [*worlds, (2, 2, 300)]:
        progress = stored(progress).for_world(ranks, workers)
        lanes = [make_lane_items(progress, lane, sizes, batch) for lane in range(ranks * workers)]
        for step in range(steps + 1):
            reports, taken = [], list[Sample]()
            for rank in range(ranks):
                worker = chooser.randrange(workers)
                samples, _, done, read, _ = next(lanes[worker * ranks + rank])
                taken += samples or []
                reports.append(((worker + 1) % workers, [(worker, done, read)]))
            if step == steps:
                break
            counted += taken
            progress = progress.after(reports)
    assert sorted(counted) == [(shard, n) for shard, size in enumerate(sizes) for n in range(size)]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4))
def test_deal_gives_each_shard_to_one_lane_and_all_ranks_as_many(
    shards: int, ranks: int, workers: int
) -> None:
    """Few shards reach all ranks: two workers of one rank get one only if each rank has one."""
    deal = ShardProgress(shards).for_world(ranks, workers).deal()
    assert sorted(itertools.chain(*deal)) == [(place, 0) for place in range(shards)]
    by_rank = [sum(map(len, deal[rank::ranks])) for rank in range(ranks)]
    assert max(by_rank) - min(by_rank) <= 1


def test_same_lanes_keep_the_deal_and_others_begin_with_begun_shards() -> None:
    """So a resumed run of the same size reads the same batches."""
    progress = ShardProgress(6).for_world(2, 1).after([(0, [(0, 1, 3)]), (0, [(0, 0, 2)])])
    assert progress.deal() == [[(0, 0), (2, 0), (4, 0)], [(1, 0), (3, 0), (5, 0)]]
    assert stored(progress).for_world(2, 1) == progress
    assert progress.without_lanes().begun == ((1, 2), (2, 3))
    other = progress.for_world(1, 2)
    assert other.deal() == [[(1, 2), (3, 0), (5, 0)], [(2, 3), (4, 0)]]
    assert (other.finished, other.without_lanes().begun, other.turns) == (1, ((1, 2), (2, 3)), (0,))
    assert other.for_world(3, 1).deal() == [[(1, 2), (4, 0)], [(2, 3), (5, 0)], [(3, 0)]]


def test_state_of_many_shards_is_small() -> None:
    """100,000 shards on 128 lanes, of which some are far ahead."""
    progress = ShardProgress(100_000).for_world(16, 8)
    reports = [
        (0, [(worker, 300 + 7 * rank + worker, 5) for worker in range(8)]) for rank in range(16)
    ]  # a slow lane has finished 300 shards, the fastest 412
    progress = progress.after(reports).for_world(12, 8)
    assert len(json.dumps(json_codec.encode(progress.to_state()))) < 8000
    assert stored(progress) == progress
