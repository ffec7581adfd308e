"""Read shards of samples, such as files, once per epoch over all ranks, and resume within an epoch.

`ShardedStream` is a loader whose position in each shard is saved with each step. It assigns each shard to one
lane, which is one DataLoader worker of one rank (`ShardProgress`). torch's DataLoader reads ahead, so each
batch carries the progress of its lane. When the script takes a batch, the ranks exchange this progress. So
all ranks know the whole progress, the weight of their loss, and the end of the epoch. `Run.step` records the
batches since the last step. Prefetched batches, and those of an unfinished step, are read again.

A deal assigns each shard to one lane, and a lane reads its shards one after the other. So the progress after
a deal is two numbers for each lane: its finished shards, and the samples that were read of the next one. A
world with the same lanes continues with the same deal, and reads the same batches. Any other world deals the
remaining shards anew, begun shards first.

Invariant: each sample is counted once per epoch, whatever fails and however many ranks there are, if ``read``
returns the same samples each time. If the number of ranks and workers never changes, a resumed run reads the
same batches as an undisturbed one.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as loader_worker

from elastic_resume.data import rng
from elastic_resume.data.batch_size import check_bool, check_integer
from elastic_resume.data.global_batches import make_permutation
from elastic_resume.data.rank_values import Ranks
from elastic_resume.errors import ConfigError, MismatchError, UsageError
from elastic_resume.units import format_count

logger = logging.getLogger(__name__)

MAX_SHARDS = 1_000_000
OWN_OPTIONS = {"dataset", "sampler", "batch_sampler", "drop_last", "generator"}
_SHARD_SALT, _SAMPLE_SALT = 3, 4  # see rng.mix_words

# A batch, its worker, the lane's progress after it, and its number of samples: 0 when the lane is at its end.
_Item = tuple[Any, int, int, int, int]


Entry = tuple[int, int]  # a shard's place in the order, and the samples that were read before the deal
LaneReport = tuple[int, int, int]  # worker, finished shards, samples read of the next one


@dataclass(frozen=True)
class ShardProgress:
    """The progress of all lanes in one epoch.

    Attributes:
        shards: number of shards.
        epoch: number of the epoch.
        finished: a bit for each place whose shard was finished before the deal.
        begun: shards that were begun before the deal and not finished.
        lanes: (finished shards of the lane, samples read of its next one); empty before the first deal.
            Lane ``worker * ranks + rank`` is that of a rank's worker, so that a few shards spread over all
            ranks before a rank gets a second one.
        turns: the worker of each rank whose batch is next.

    """

    shards: int
    epoch: int = 0
    finished: int = 0
    begun: tuple[Entry, ...] = ()
    lanes: tuple[tuple[int, int], ...] = ()
    turns: tuple[int, ...] = ()

    def deal(self) -> list[list[Entry]]:
        """Return the shards of each lane."""
        known = {place for place, _ in self.begun}
        finished = f"{self.finished:b}"[::-1].ljust(self.shards, "0")
        fresh = [(place, 0) for place in range(self.shards) if finished[place] == "0" and place not in known]
        left = [*self.begun, *fresh]
        return [left[lane :: len(self.lanes)] for lane in range(len(self.lanes))]

    def without_lanes(self) -> ShardProgress:
        """Return the same progress without lanes, as ``finished`` and ``begun`` shards only."""
        bits = list(f"{self.finished:b}"[::-1].ljust(self.shards, "0"))
        read = dict(self.begun)
        for entries, (done, samples) in zip(self.deal(), self.lanes, strict=True):
            for place, _ in entries[:done]:
                bits[place] = "1"
                read.pop(place, None)
            if samples:
                read[entries[done][0]] = samples
        finished = int("".join(reversed(bits)), 2)
        return ShardProgress(self.shards, self.epoch, finished, tuple(sorted(read.items())))

    def for_world(self, ranks: int, workers: int) -> ShardProgress:
        """Return the progress for ``ranks * workers`` lanes, dealt again if their number differs."""
        if (len(self.turns), len(self.lanes)) == (ranks, ranks * workers):
            return self
        return replace(self.without_lanes(), lanes=((0, 0),) * (ranks * workers), turns=(0,) * ranks)

    def after(self, reports: Sequence[tuple[int, Sequence[LaneReport]]]) -> ShardProgress:
        """Return the progress after each rank has reported its next worker and its lanes."""
        lanes = list(self.lanes)
        for rank, (_, lane_reports) in enumerate(reports):
            for worker, done, samples in lane_reports:
                lanes[worker * len(self.turns) + rank] = done, samples
        return replace(self, lanes=tuple(lanes), turns=tuple(turn for turn, _ in reports))

    def to_state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint. Most finished shards precede all others in the order."""
        first = (~self.finished & (self.finished + 1)).bit_length() - 1
        return {
            "epoch": self.epoch,
            "finished": [first, self.finished >> first],
            "begun": _to_text(self.begun),
            "lanes": _to_text(self.lanes),
            "turns": list(self.turns),
        }

    @staticmethod
    def parse(state: Mapping[str, Any], shards: int) -> ShardProgress:
        """Parse the result of `to_state`."""
        first, others = state["finished"]
        return ShardProgress(
            shards,
            state["epoch"],
            finished=others << first | (1 << first) - 1,
            begun=_parse_pairs(state["begun"]),
            lanes=_parse_pairs(state["lanes"]),
            turns=tuple(state["turns"]),
        )


def _to_text(pairs: Sequence[Entry]) -> str:
    """Return pairs as one text: a checkpoint stores it much faster than as many numbers."""
    return " ".join(f"{first}:{second}" for first, second in pairs)


def _parse_pairs(text: str) -> tuple[Entry, ...]:
    """Parse the result of `_to_text`."""
    pairs = (pair.split(":") for pair in text.split())
    return tuple((int(first), int(second)) for first, second in pairs)


class ShardedStream:
    """Batches of samples that can only be read one after the other, from shards such as files.

    It is the loader of its script::

        def read(path):
            with open(path) as lines:
                for line in lines:
                    yield parse(line)

        stream = er.ShardedStream(sorted(glob.glob("data/*.jsonl")), read, batch_size=32, num_workers=4)
        run = er.resume(model=model, optimizer=optimizer, data=stream)
        for epoch in run.epochs(EPOCHS):
            for batch in stream:
                ...
                run.step()

    Each sample counts once per epoch, also if the number of ranks changes within the epoch. The batches are
    the same after a resume with the same number of ranks and workers. The order of shards depends on the seed
    and the epoch.

    Every rank gets ``batch_size`` samples, and fewer at the end of its shards. Multiply the loss by
    ``run.loss_weight``: DDP's mean over the ranks is then the exact mean over all samples of the step. A rank
    whose shards are finished before those of others gets any batch, with a weight of 0.0. Make many shards
    of similar sizes, several for each worker.

    Iterate on all ranks alike, in the training thread: the ranks exchange their progress at each batch. Do
    not read ahead of the step, since `Run.step` counts every batch that was taken.
    """

    def __init__(
        self,
        shards: Iterable[Any],
        read: Callable[..., Iterable[Any]],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **loader_options: Any,
    ) -> None:
        """Describe the stream; nothing is read before the first iteration.

        Args:
            shards: what ``read`` takes, the same on all ranks and in the same order: paths, or numbers as in
                ``range(n)`` for ``dataset.shard(n, index)``.
            read: returns the samples of one shard, always the same ones. If it has a parameter ``start``, it
                must skip that many samples itself. Otherwise a resume reads begun shards from their start.
                torch's CPU generator, `random` and numpy's are seeded for each sample. Within it torch's
                ``get_worker_info()`` is None: libraries would divide the shard among the workers once more.
            batch_size: samples of one batch on one rank.
            seed: decides the order of the shards and the random numbers of the samples.
            shuffle: whether the shards have another order in each epoch.
            num_workers: processes that read on each rank, as in a DataLoader.
            collate_fn: makes a batch of a list of samples; torch's ``default_collate`` if None.
            loader_options: other arguments of torch's DataLoader, such as ``pin_memory=True``.

        Raises:
            ConfigError: an argument has the wrong type, or there is no shard.

        """
        self._shards = list(shards)
        check_integer("the number of shards", len(self._shards), least=1, most=MAX_SHARDS)
        if not callable(read):
            raise ConfigError(f"read must be a function that yields the samples of a shard, got {read!r}.")
        self._read = read
        self.batch_size = check_integer("batch_size", batch_size, least=1)
        self.seed = check_integer("seed", seed, least=-(2**63))
        self.shuffle = check_bool("shuffle", shuffle)
        self._num_workers = check_integer("num_workers", num_workers, least=0)
        refused = sorted({*loader_options} & OWN_OPTIONS)
        if refused or not loader_options.get("in_order", True):
            raise ConfigError(
                f"a ShardedStream cannot take {', '.join(refused) or 'in_order=False'}: it decides the order "
                "of samples itself."
            )
        self._collate = collate_fn or default_collate
        self._loader_options = loader_options
        self._order_arguments = {
            "shards": len(self._shards),
            "names": _digest_names(self._shards),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        self._progress = ShardProgress(len(self._shards))  # what finished steps have read
        self._taken, self._taken_samples = self._progress, 0  # what the script has taken
        self.is_over = False  # whether the iteration of this epoch has come to its end
        self._is_read = False  # whether an iteration of this epoch is open
        self._is_resumed = False
        self._ranks: Ranks | None = None
        self._before_batch: Callable[[bool], None]
        self._after_last_batch: Callable[[], None]
        self._filler: Any = None
        self.loss_weight = 1.0  # of the newest batch; see `Run.loss_weight`
        self.saved_batch_size = self.batch_size

    # ---- what the Run calls ------------------------------------------------------------------------

    def bind(
        self, ranks: Ranks, before_batch: Callable[[bool], None], after_last_batch: Callable[[], None]
    ) -> None:
        """Set how the ranks exchange progress, and what to call before each batch and at an epoch's end.

        Progress is reset; `load_state_dict` may set it afterwards.

        Raises:
            ConfigError: the ranks made different streams, which would repeat samples and skip others.

        """
        self._ranks, self._before_batch, self._after_last_batch = ranks, before_batch, after_last_batch
        self._progress, self._is_resumed = ShardProgress(len(self._shards)), False
        own = {**self._order_arguments, "batch_size": self.batch_size, "num_workers": self._num_workers}
        first, *others = ranks.gather(own)
        for rank, other in enumerate(others, 1):
            for name in own:
                if other[name] != first[name]:
                    raise ConfigError(
                        f"the ranks made different ShardedStreams: {name} is {first[name]!r} on rank 0 and "
                        f"{other[name]!r} on rank {rank}. Give every rank the same arguments; sort the names "
                        "of files, since each machine lists them in another order."
                    )

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on with the one that was interrupted."""
        if epoch != self._progress.epoch:
            self._progress = ShardProgress(len(self._shards), epoch)
        self._taken, self._taken_samples = self._progress, 0
        self.is_over = self._is_read = False

    @property
    def uncounted_samples(self) -> int:
        """The samples of all ranks that were taken since the last step."""
        return self._taken_samples

    def count_step(self) -> int:
        """Count the batches that were taken since the last step; return the samples of all ranks."""
        samples, self._taken_samples = self._taken_samples, 0
        self._progress = self._taken
        return samples

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the order of samples, and the progress of all ranks."""
        return {
            **self._order_arguments,
            "batch_size": self.batch_size,
            "progress": self._progress.to_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was saved.

        Raises:
            MismatchError: the shards or their order differ; continuing would repeat some and skip others.

        """
        differing = [
            f"{name} is {value!r} here, {state.get(name, 'missing')!r} in the checkpoint"
            for name, value in self._order_arguments.items()
            if state.get(name) != value
        ]
        if differing:
            raise MismatchError(
                f"The order of shards differs: {'; '.join(differing)}. Continuing would repeat some samples "
                "and skip others. Give ShardedStream the checkpoint's values, or start from scratch "
                "(--resume never, or another --rdzv-id)."
            )
        self._progress = self._taken = ShardProgress.parse(state["progress"], len(self._shards))
        self.saved_batch_size = check_integer("batch_size", state["batch_size"], least=1)
        self._is_resumed = True

    # ---- what the script does ------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches from the last finished step to the end of the epoch.

        Raises:
            UsageError: the stream is not the ``data=`` of a run, its epoch is over, or another loop reads it.

        """
        ranks = self._ranks
        if ranks is None:
            raise UsageError(
                "a ShardedStream was read before er.resume(): pass it as data=, which shares it among ranks."
            )
        if self.is_over:
            raise UsageError(
                f"epoch {self._progress.epoch} of the ShardedStream is over: write "
                "`for epoch in run.epochs(EPOCHS)` around the loop over the stream."
            )
        if self._is_read:
            raise UsageError(
                "a ShardedStream was read by a second loop within the first one, which would count its "
                "samples twice. For an evaluation read the validation data with a loader of its own."
            )
        self._is_read = True
        try:
            yield from self._read_batches(ranks)
        finally:
            self._is_read = False
        self.is_over = True
        self.loss_weight = 1.0
        self._after_last_batch()

    def _read_batches(self, ranks: Ranks) -> Iterator[Any]:
        """Yield this rank's batches, until no rank has one left."""
        self._deal(ranks)
        self._taken, self._taken_samples = self._progress, 0
        batches, is_first = self._read_own_lanes(ranks), True
        while True:
            self._before_batch(is_first)
            is_first = False
            with rng.preserve_cpu_generators() if not self._num_workers else contextlib.nullcontext():
                batch, samples, turn, reports = next(batches)
            gathered = ranks.gather([samples, turn, reports])
            total = sum(count for count, _, _ in gathered)
            self._taken = self._taken.after([(turn, reports) for _, turn, reports in gathered])
            self._taken_samples += total
            if not total:
                return
            self.loss_weight = samples * ranks.size / total
            yield batch if samples else self._make_filler(ranks.rank)

    def _deal(self, ranks: Ranks) -> None:
        """Deal the shards if the lanes have changed; log once per resume what that costs."""
        count = len(self._shards)
        begun = self._progress.without_lanes().begun if self._is_resumed and ranks.rank == 0 else ()
        if begun and not _takes_start(self._read):
            samples = sum(samples for _, samples in begun)
            logger.info(
                f"{format_count(samples, 'sample')} of {format_count(len(begun), 'begun shard')} will be "
                "read again and skipped, because read() has no parameter start."
            )
        self._is_resumed = False
        if not self._progress.lanes and count < ranks.size and ranks.rank == 0:
            logger.warning(
                f"WARNING: the ShardedStream has {format_count(count, 'shard')} for {ranks.size} ranks, so "
                f"{ranks.size - count} of them read nothing. Make more shards, several for each rank."
            )
        self._progress = self._progress.for_world(ranks.size, max(1, self._num_workers))

    def _read_own_lanes(self, ranks: Ranks) -> Iterator[tuple[Any, int, int, list[LaneReport]]]:
        """Yield each batch, its number of samples, the worker that is next, and the lanes' progress."""
        progress, workers, rank = self._progress, max(1, self._num_workers), ranks.rank
        turn = progress.turns[rank]
        lanes = progress.deal()[rank :: ranks.size]
        loader: DataLoader[Any] = DataLoader(
            self._make_reader(progress.epoch, lanes, progress.lanes[rank :: ranks.size], turn),
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_keep,
            generator=torch.Generator(),  # else the loader would draw from the script's random numbers
            **self._loader_options,
        )
        items: Iterator[_Item] = iter(loader)
        while True:
            reports: list[LaneReport] = []
            for batch, worker, done, read, samples in islice(items, workers):
                reports.append((worker, done, read))
                turn = (worker + 1) % workers
                if samples:
                    yield batch, samples, turn, reports
                    break
            else:
                yield None, 0, turn, reports
                break
        del items  # its workers end
        while True:  # until the other ranks are at their end too
            yield None, 0, turn, []

    def _make_reader(
        self,
        epoch: int,
        lanes: Sequence[Sequence[Entry]],
        positions: Sequence[tuple[int, int]],
        turn: int = 0,
    ) -> _LaneReader:
        count = len(self._shards)
        order = make_permutation(count, self.seed, epoch).tolist() if self.shuffle else range(count)
        shards = [[(order[place], self._shards[order[place]], start) for place, start in e] for e in lanes]
        seed = rng.mix_words(self.seed, epoch, 0, _SHARD_SALT)
        return _LaneReader(shards, positions, turn, self._read, self._collate, self.batch_size, seed)

    def _make_filler(self, rank: int) -> Any:
        """Return a batch for a rank that has none left, as a copy: the script may change its batches."""
        if self._filler is None:
            count = len(self._shards)
            places = [((rank + place) % count, 0) for place in range(count)]
            with rng.preserve_cpu_generators():
                # The first epoch's samples in all epochs, also after a restart: BatchNorm sees the filler.
                self._filler = next(iter(self._make_reader(0, [places], [(0, 0)])))[0]
        return copy.deepcopy(self._filler)


@dataclass(frozen=True, eq=False)
class _LaneReader(IterableDataset[_Item]):
    """Reads the lanes of one rank, each in one worker of its loader."""

    lanes: Sequence[Sequence[tuple[int, Any, int]]]  # the (index, shard, start) of each shard of each lane
    positions: Sequence[tuple[int, int]]  # each lane's finished shards, and samples read of the next one
    turn: int  # the lane of the loader's first worker
    read: Callable[..., Iterable[Any]]
    collate: Callable[[list[Any]], Any]
    batch_size: int
    seed: int  # of the epoch

    def __iter__(self) -> Iterator[_Item]:
        """Yield the batches of one lane, then end markers without limit: so the loader skips no worker."""
        info = get_worker_info()
        worker = ((info.id if info else 0) + self.turn) % len(self.lanes)
        entries, (first, read) = self.lanes[worker], self.positions[worker]
        samples: list[Any] = []
        for done in range(first, len(entries)):
            index, shard, start = entries[done]
            if done == first and read:
                start = read
            for count, sample in self._read_shard(index, shard, start):
                samples.append(sample)
                if len(samples) == self.batch_size:
                    yield self.collate(samples), worker, done, count, len(samples)
                    samples = []
        if samples:
            yield self.collate(samples), worker, len(entries), 0, len(samples)
        while True:
            yield None, worker, len(entries), 0, 0

    def _read_shard(self, index: int, shard: Any, start: int) -> Iterator[tuple[int, Any]]:
        """Yield the samples of a shard after the first ``start``, each with its number, from 1 on."""
        takes_start = _takes_start(self.read)
        position = start if takes_start else 0
        rng.seed_cpu_generators(rng.mix_words(self.seed, index, position, _SAMPLE_SALT))
        with _hide_worker():
            samples = iter(self.read(shard, start=start) if takes_start else self.read(shard))
        while True:
            rng.seed_cpu_generators(rng.mix_words(self.seed, index, position, _SAMPLE_SALT))
            try:
                with _hide_worker():
                    sample = next(samples)
            except StopIteration:
                if position < start:
                    raise MismatchError(
                        f"shard {index} ({str(shard)[:200]}) has {format_count(position, 'sample')} now, but "
                        f"{start} were read from it before the restart. Each read() of a shard must "
                        "return the same samples. Restore the shard, or start from scratch (--resume never, "
                        "or another --rdzv-id)."
                    ) from None
                return
            position += 1
            if position > start:
                yield position, sample


def _digest_names(shards: Sequence[Any]) -> str:
    """Return a digest of the shards' names and order, without the directory that all files are in."""
    has_name = [getattr(type(shard), "__repr__", None) is not object.__repr__ for shard in shards]
    names = [str(s) if named else type(s).__name__ for s, named in zip(shards, has_name, strict=True)]
    names = [re.sub(r" at 0x[0-9a-f]+", "", name) for name in names]  # functions have an address
    directory = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071  commonpath refuses mixed names
    return xxhash.xxh3_64_hexdigest("\n".join(name.removeprefix(directory) for name in names).encode())


@contextlib.contextmanager
def _hide_worker() -> Iterator[None]:
    """Let ``get_worker_info()`` return None, as outside of a loader's worker.

    Libraries such as datasets and webdataset divide what they read among the workers, but a shard belongs to
    one worker. torch has no public way to hide them.
    """
    info, loader_worker._worker_info = loader_worker._worker_info, None  # noqa: SLF001
    try:
        yield
    finally:
        loader_worker._worker_info = info  # noqa: SLF001


def _keep(item: Any) -> Any:
    """Collate nothing: the reader has made the batch."""
    return item


def _takes_start(read: Callable[..., Any]) -> bool:
    """Return whether ``read`` has a parameter ``start``."""
    with contextlib.suppress(TypeError, ValueError):  # functions written in C may have no signature
        return "start" in inspect.signature(read).parameters
    return False
