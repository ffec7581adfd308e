"""Track the position of training: finished epochs, steps and samples, and the next batch's loss weight.

The position changes in `run.step()` and at the end of an epoch only, so prefetched or unfinished batches
never count.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.data import batch_size
from elastic_resume.data.batch_size import WorldChange
from elastic_resume.data.global_batches import SECOND_SHARDING, GlobalBatches, MicroBatch
from elastic_resume.data.sharded_stream import ShardedStream
from elastic_resume.errors import UsageError
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.units import format_count

logger = logging.getLogger(__name__)

T = TypeVar("T")
NO_STEP = (
    "an epoch is over, and run.step() was never called, so nothing would be saved: call it once after each "
    "optimizer step."
)
MAX_GROWING_STEPS = 32  # a script's queue of batches that are read ahead is full after fewer steps
MAX_EQUAL_STEPS = 3  # without a thread that fills a queue, so many equal intervals are the script's loop


@dataclass(frozen=True)
class RunOptions:
    """The arguments of `er.resume` that are no `Settings`. ``rng`` is one of `rng.MODES`."""

    seed: int | None  # None: use the seed of rank 0
    rng: str
    on_world_change: str | None = None


class TrainingProgress:
    """The position of one rank in this generation; it is the same on all ranks."""

    def __init__(
        self,
        manifest: Manifest | None,
        batches: GlobalBatches | None,
        options: RunOptions,
        collectives: Collectives,
        stream: ShardedStream | None = None,
    ) -> None:
        """Start at the manifest's position, or at zero without a manifest."""
        data = stream if batches is None else batches
        self.position = _start_position(manifest, data)
        batch_size.check_change_allowed(
            options.on_world_change, manifest.world_size if manifest else None, collectives.size
        )
        self.world_change = _apply_world_size(manifest, data, collectives.size)
        # Without data= the order of samples is unknown, so the epoch's finished steps cannot be skipped.
        self.repeated_steps = manifest.position.step_in_epoch if manifest and batches is None else 0
        self.is_epoch_over = False  # the last epoch is done, with the script's work after its last step
        self._batches = batches
        self._stream = stream
        self._micro_batch: int | None = None  # index in its step; None without `read_micro_batches`
        self._growing_steps = self._equal_steps = self._batches_per_step = 0  # see `_check_what_was_read`
        self._seen_batches: int | None = None
        self._trained_batches = 0
        self._was_share_read = False  # see `_check_whole_epoch`
        self._rank, self._world_size = collectives.rank, collectives.size
        self.is_counted_by_requests = False  # of `er.epochs`, which knows what its loop has read
        self._reads_ahead = False  # the loop takes the weights from `upcoming_batches`

    @property
    def loss_weight(self) -> float:
        """The factor for this rank's mean loss; see `Run.loss_weight`."""
        batches, at = self._batches, self.position.step_in_epoch
        if self._stream is not None:
            return self._stream.loss_weight
        if batches is None or at >= batches.steps:
            return 1.0
        if self._micro_batch is None:
            self._require_micro_batch_reading()
            return batches.loss_weight(at)
        return batches.loss_weight(at, max(0, self._micro_batch))

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the script has read the last micro-batch of its step."""
        self._require_micro_batch_reading()
        return self._micro_batch is None or self._micro_batch + 1 >= self._micro_batch_count()

    def read_micro_batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of ``loader``, and count them within their step.

        Raises:
            UsageError: all micro-batches of the step were read and `run.step()` was not called.

        """
        self._micro_batch = -1
        for item in loader:
            if not self.has_no_batch_left and self._micro_batch + 1 >= self._micro_batch_count():
                raise UsageError(
                    f"the {self._micro_batch_count()} micro-batches of step {self.position.step + 1} were "
                    "read and run.step() was not called: call it when run.last_micro_batch is true."
                )
            self._micro_batch += 1
            yield item

    def upcoming_batches(self) -> Iterator[MicroBatch]:
        """Yield what belongs to each batch from the position to the end of the epoch.

        Raises:
            UsageError: ``data=`` is no `GlobalBatches` or loader around it or an `ElasticSampler`.

        """
        if self._batches is None:
            raise UsageError(
                "upcoming_batches() needs the order of samples: pass data= to er.resume(), a GlobalBatches "
                "or a loader with an ElasticSampler. A ShardedStream has none: use run.loss_weight."
            )
        self._reads_ahead = True
        return self._batches.micro_batches_from(self.position.step_in_epoch)

    @property
    def epoch_start_step(self) -> int:
        """The step whose random numbers a script draws at the top of the current epoch.

        With ``data=`` the epoch's first batch in this process draws those of the present step.
        """
        return self.position.step - (self.position.step_in_epoch if self._batches is not None else 0)

    @property
    def has_no_batch_left(self) -> bool:
        """Whether the epoch has no batch left."""
        return self._batches is not None and self.position.step_in_epoch >= self._batches.steps

    def start_epoch(self, *, from_start: bool = False) -> int:
        """Move the data to the epoch's next step, or to its first; return the number of the epoch."""
        self._micro_batch, self._reads_ahead = None, False
        self._growing_steps = self._equal_steps = self._batches_per_step = 0
        self._seen_batches = self._batches.loader_prefetch if self._batches is not None else None
        self._trained_batches = 0
        if self._batches is not None and from_start:
            self._batches.seek_start(self.position.epoch)
        elif self._batches is not None:
            self._batches.seek(self.position.epoch, self.position.step_in_epoch)
        elif self._stream is not None and from_start:
            raise UsageError(
                "a ShardedStream cannot read an epoch from its start and skip finished steps. Read on from "
                "run.begin_epoch(), without from_start, instead."
            )
        elif self._stream is not None:
            self._stream.start_epoch(self.position.epoch)
        self._log_repeated_steps()
        return self.position.epoch

    def _log_repeated_steps(self) -> None:
        """Log that the loop over epochs starts an epoch over. A loop over steps never comes here."""
        steps, self.repeated_steps = self.repeated_steps, 0
        if steps and self._rank == 0:
            logger.info(
                f"epoch {self.position.epoch} starts over and repeats "
                f"{format_count(steps, 'finished step')}, because resume() got no data="
            )

    def count_step_batches(self, default: int) -> int:
        """Return the number of the loader's batches in the current step, ``default`` if it is not known."""
        return default if self._batches is None else self._micro_batch_count()

    def enumerate_batches(self, loader: Iterable[T]) -> Iterator[tuple[int, T]]:
        """Yield each batch with its index in the whole epoch. See `Run.enumerate`."""
        iterator = iter(loader)  # may end a step
        at = self.position.step_in_epoch
        start = at if self._batches is None or self.has_no_batch_left else self._batches.batches_before(at)
        return enumerate(iterator, 0 if self.has_no_batch_left else start)

    def finish_step(self, skipped: int = 0) -> Position:
        """Count a finished step, and ``skipped`` ones before it; return the new position.

        Raises:
            UsageError: the epoch has no step left, or micro-batches of the step are missing.

        """
        before, batches = self.position, self._batches
        stop = before.step_in_epoch + 1 + skipped
        samples = before.samples
        if batches is not None:
            if stop > batches.steps:
                raise UsageError(
                    f"run.step() was called {stop} times in epoch {before.epoch}, which has "
                    f"{format_count(batches.steps, 'step')}: write `for epoch in run.epochs(EPOCHS)`, and "
                    "call step() once after each optimizer step."
                )
            count = self._micro_batch_count()
            if not batches.has_equal_parts:
                self._require_micro_batch_reading()
            if self._micro_batch is not None and self._micro_batch + 1 != count:
                raise UsageError(
                    f"run.step() was called after {self._micro_batch + 1} of the {count} micro-batches of "
                    f"step {before.step + 1}: call it when run.last_micro_batch is true."
                )
            self._check_what_was_read(batches, count * (1 + skipped))
            samples += sum(map(batches.samples, range(before.step_in_epoch, stop)))
            batches.advance(stop)
        elif self._stream is not None:
            samples += self._stream.count_step()
        self.position = Position(before.epoch, stop, before.step + 1 + skipped, samples)
        self.is_epoch_over = False
        if self._micro_batch is not None:
            self._micro_batch = -1
        return self.position

    def end_epoch(self) -> None:
        """Count the epoch, with the script's work after its last step.

        Raises:
            UsageError: batches of the epoch were read, and no step was counted for them.

        """
        if self._batches is not None:
            self._check_whole_epoch(self._batches, self.position.step_in_epoch)
        if self._stream is not None and self._stream.is_over and self._stream.uncounted_samples:
            if not self.position.step:
                raise UsageError(NO_STEP)
            if self._rank == 0:
                logger.warning(
                    f"WARNING: {format_count(self._stream.uncounted_samples, 'sample')} of epoch "
                    f"{self.position.epoch} came after its last run.step(). If their gradients wait for the "
                    "next epoch, a restart loses them: take an optimizer step at the end of each epoch."
                )
        self.position = self._next_epoch_position()
        if self._stream is not None:
            self._stream.start_epoch(self.position.epoch)
        self.is_epoch_over = True

    def stop(self) -> None:
        """End the training within its epoch, or at its end."""
        # A second state of an epoch's end needs a step of its own.
        step = self.position.step + self.is_epoch_over
        self.position, self.is_epoch_over = replace(self._next_epoch_position(), step=step), True

    def position_to_resume_from(self) -> tuple[Position, bool]:
        """Return the position for a save after an epoch's last batch, and whether its epoch is over."""
        if self.is_epoch_over:
            return self.position, True
        if self.has_no_batch_left or (self._stream is not None and self._stream.is_over):
            return self._next_epoch_position(), True
        return self.position, self.is_epoch_over

    def _next_epoch_position(self) -> Position:
        return replace(self.position, epoch=self.position.epoch + 1, step_in_epoch=0)

    def _micro_batch_count(self) -> int:
        """Return the number of micro-batches in the current step."""
        batches, at = self._batches, self.position.step_in_epoch
        return 1 if batches is None or at >= batches.steps else batches.parts(at)

    def _require_micro_batch_reading(self) -> None:
        batches = self._batches
        if (
            batches is None
            or batches.micro_batch is None
            or self._micro_batch is not None
            or self._reads_ahead
        ):
            return
        if batches.has_equal_parts:
            raise UsageError(
                "with accumulate= run.loss_weight and run.last_micro_batch need `for batch in "
                "run.micro_batches(loader)`: multiply the loss by the weight then, and do not divide it. A "
                "loop over the loader that divides the loss itself needs neither."
            )
        raise UsageError(
            "with micro_batch= a step has several micro-batches, each with a loss weight of its own: "
            "write `for batch in run.micro_batches(loader)`, and call run.step() when "
            "run.last_micro_batch is true."
        )

    def _check_what_was_read(self, batches: GlobalBatches, expected: int) -> None:
        """Raise UsageError if the steps do not read the ``expected`` number of the loader's batches each.

        The loader's own reading ahead is over before the first step. A script's thread that reads ahead has a
        limit, so it does not read more than it trains on for ever.
        """
        seen, self._seen_batches = self._seen_batches, batches.handed_out
        read = 0 if seen is None else batches.handed_out - seen
        self._growing_steps = self._growing_steps + 1 if read > expected else 0
        self._equal_steps = self._equal_steps + 1 if read == self._batches_per_step else 1
        self._batches_per_step = read
        is_loop = batches.requesting_thread == threading.get_ident() and self._equal_steps >= MAX_EQUAL_STEPS
        if self._growing_steps >= (MAX_EQUAL_STEPS if is_loop else MAX_GROWING_STEPS):
            raise UsageError(self._describe_unread_batches(batches, read))
        self._trained_batches += expected
        if expected > 1 and batches.iterators == 1 and batches.handed_out < self._trained_batches:
            raise UsageError(
                f"run.step() was called again before {expected} batches of the loader were read, and the "
                f"ElasticSampler has accumulate={expected}: call it once per optimizer step, after "
                f"{expected} batches."
            )

    def _check_whole_epoch(self, batches: GlobalBatches, at: int) -> None:
        """Raise UsageError if most of the epoch was handed out, and no step was counted for it.

        A loop that leaves an epoch early looks the same if its loader had read the rest ahead. But it does
        not leave two epochs after exactly one rank's share of the steps.
        """
        if batches.exhausted and not self.position.step:
            raise UsageError(NO_STEP)
        if at >= batches.steps or self.is_counted_by_requests:
            return
        is_half = batches.exhausted and 0 < 2 * at <= batches.steps + 1
        is_explained = batches.steps - at <= (batches.loader_prefetch or 0)
        is_share = at in {batches.steps // self._world_size, -(-batches.steps // self._world_size)}
        if is_half and (not is_explained or (is_share and self._was_share_read)):
            batches_per_step = round(len(batches) / at)
            text = self._describe_unread_batches(batches, batches_per_step)
            if batches.loader_prefetch is None:
                text += " If the loop leaves epochs early, pass the loader as data=."
            raise UsageError(text)
        self._was_share_read = is_half and is_share

    def _describe_unread_batches(self, batches: GlobalBatches, batches_per_step: int) -> str:
        text = (
            f"run.step() was called once per {batches_per_step} batches of the loader: "
            f"{batches.explain_accumulation(batches_per_step)}"
        )
        if batches_per_step == self._world_size * self._micro_batch_count():
            text += f" If an optimizer step reads one batch: {SECOND_SHARDING}"
        return text


class StepLimit:
    """The last step that this generation may take, if workers of other nodes have finished."""

    def __init__(self, text: str) -> None:
        """``text`` is empty or "STEP NODES": see `RestartController.limit_last_step`."""
        step, _, self._nodes = text.partition(" ")
        self._last_step = int(step) if step else None

    def check(self, step: int) -> None:
        """Raise UsageError for a step after ``step``, if the training has ended on other nodes."""
        if self._last_step is not None and step >= self._last_step:
            raise UsageError(
                f"the training has ended on {self._nodes}, and the ranks here would take step "
                f"{step + 1} without it. Do all nodes have the same arguments, and end after "
                f"the same step? What {self._nodes} saved is complete."
            )


def _start_position(manifest: Manifest | None, data: GlobalBatches | ShardedStream | None) -> Position:
    if manifest is None:
        return Position(epoch=0, step_in_epoch=0, step=0, samples=0)
    position = manifest.position
    return position if data is not None else replace(position, step_in_epoch=0)


def _apply_world_size(
    manifest: Manifest | None, data: GlobalBatches | ShardedStream | None, world_size: int
) -> WorldChange | None:
    """Divide epochs among the ranks of this world; return the change since the manifest, if any."""
    if manifest is None:
        if isinstance(data, GlobalBatches):
            data.begin_generation(None, None)
        return None
    old_batch: int | None = None
    new_batch: int | None = None
    if isinstance(data, GlobalBatches):
        old_batch = data.begin_generation(manifest.position, manifest.world_size)
        new_batch = data.global_batch
    elif data is not None:
        old_batch, new_batch = data.saved_batch_size * manifest.world_size, data.batch_size * world_size
    if (old_batch, manifest.world_size) == (new_batch, world_size):
        return None
    return WorldChange(manifest.world_size, world_size, old_batch, new_batch)
