"""Count the steps of a loop by what it asks for, so that the script needs no ``run.step()``.

A step ends when the loop asks its loader for the next batch after an optimizer step, or asks for the next
epoch. So all that the loop does after ``optimizer.step()`` belongs to the step that it follows.

The position in the data counts batches, so a step must cover all that were read since the last one. A batch
without an optimizer step, which the loop has skipped, is counted with the optimizer step that follows. Three
loops look alike in their first steps: one that skips a batch, one that accumulates gradients, and one that
reads ahead. So nothing is counted before one step has read the number of batches that the data order expects.
A loop that does not get there is refused. Once it has, batches in between were skipped.
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic_resume.errors import ConfigError, UsageError
from elastic_resume.state.shared_groups import list_with_inner
from elastic_resume.units import format_count

logger = logging.getLogger(__name__)

MAX_UNEXPECTED = 2  # steps in a row with another number of batches than expected
MAX_STRAYS = 2  # optimizer steps in an epoch before its loader is read; one may be a warm-up
MAX_SKIPPING = 8  # such steps in a row of a loop that has read the expected number before
IS_KNOWN = "has_counted_steps"  # a mark of the checkpoint: the loop has read the expected number before


class EpochState(enum.Enum):
    """What the loop does in an epoch.

    A loop may look through the loader first, without any optimizer step::

        CLOSED --begin--> OPEN --the loop's iterator ends--> TRAINED, if the loop took optimizer steps on it
                                                       `---> LOOKED_THROUGH --a later one ends--> TRAINED

    Each state goes to CLOSED when the loop asks for the next epoch, and to OPEN when that begins.
    """

    CLOSED = enum.auto()
    OPEN = enum.auto()
    LOOKED_THROUGH = enum.auto()
    TRAINED = enum.auto()

    def end_iterator(self, *, has_trained: bool) -> EpochState:
        """Return the state after the end of the loop's iterator."""
        if self is EpochState.CLOSED:
            return self
        return EpochState.TRAINED if has_trained else EpochState.LOOKED_THROUGH


class NewestRead(enum.Enum):
    """Which iterator over the loader has been read last in an epoch."""

    OF_LOOP = enum.auto()
    OF_SECOND_ITERATOR = enum.auto()
    OF_OTHER_THREAD = enum.auto()
    """It stays so for the epoch: the thread may read ahead at any time."""

    def then(self, newest: NewestRead) -> NewestRead:
        """Return the state after another read."""
        return self if self is NewestRead.OF_OTHER_THREAD else newest


class StepCounter:
    """Counts the steps of one loop. A loop without a loader calls `begin_step` and `end_open_step` itself."""

    def __init__(
        self,
        tracked: Mapping[str, Any],
        *,
        finish: Callable[[int], None],
        count_batches: Callable[[], int],
        get_marks: Callable[[], dict[str, int]],
        explain: Callable[[int], str],
    ) -> None:
        """Watch the optimizers and GradScalers among the tracked objects.

        ``finish`` counts so many steps, and marks one step boundary. ``count_batches`` returns the expected
        number of batches in the current step, and ``get_marks`` the marks of the checkpoint. ``explain`` says
        how to set another number of batches.

        Raises:
            ConfigError: there is no optimizer.

        """
        self._finish, self._count_batches = finish, count_batches
        self._get_marks, self._explain = get_marks, explain
        self._thread = 0  # runs the loop
        self._epoch = 0  # counts the epochs of this process; 0 before the first
        self._state = EpochState.CLOSED
        self._newest_read = NewestRead.OF_LOOP
        # The loop's iterator in this epoch, and the one that has returned the newest batch.
        self._loop_iterator: weakref.ref[_LoaderIterator] | None = None
        self._newest_iterator: weakref.ref[_LoaderIterator] | None = None
        self._batches = 0  # the loop's since the last optimizer step that has ended
        self._held = 0  # those before it that are not counted yet
        self._schedulers = {n: item for n, item in tracked.items() if isinstance(item, LRScheduler)}
        self._saved_counts: dict[str, int] = {}  # steps of the schedulers at a save since the last request
        self._strays = 0  # optimizer steps in this epoch before any batch of its loader was read
        self._outer_error: BaseException | None = None  # was being handled when the loop began
        self._unexpected: list[int] = []  # newest numbers of batches per step, unless they were as expected
        self.has_stepped = False  # since the last step boundary
        optimizers = [item for item in tracked.values() if isinstance(item, Optimizer)]
        if not optimizers:
            raise ConfigError(
                "er.epochs() and er.steps() count a step when an optimizer of torch takes one, and got none: "
                "pass it as optimizer=. For an optimizer of another kind use er.resume() and run.step()."
            )
        watched = {id(part): part for item in optimizers for part in list_with_inner(item)}
        for optimizer in watched.values():
            optimizer.register_step_post_hook(self._after_optimizer_step)
        for item in tracked.values():
            if isinstance(item, torch.amp.GradScaler):
                self._watch_scaler(item)

    def _watch_scaler(self, scaler: Any) -> None:
        """Count ``update()`` too: with infinite gradients the scaler leaves the optimizer's step out."""
        update = scaler.update

        @functools.wraps(update)
        def watched(*args: Any, **kwargs: Any) -> None:
            update(*args, **kwargs)
            self._after_optimizer_step()

        scaler.update = watched

    def _after_optimizer_step(self, *_: Any) -> None:
        if self._state is EpochState.CLOSED or threading.get_ident() != self._thread:
            return
        if self._newest_read is NewestRead.OF_OTHER_THREAD:
            raise UsageError(
                "another thread reads the loader of er.epochs(), perhaps ahead of the training, so "
                "its requests do not end the steps of the loop. Count them yourself: use er.resume() and "
                "run.step()."
            )
        self._find_loop()
        if self._newest_read is NewestRead.OF_SECOND_ITERATOR and not self._batches:
            raise UsageError(
                "the loop trains on a second iterator over its loader in one epoch, and er.epochs() counts "
                "the batches of the first: let each epoch read the loader once."
            )
        self.has_stepped = True
        if (iterator := self._find_loop_iterator()) is not None:
            iterator.has_trained = True
        elif not self._batches and self._state is not EpochState.TRAINED:
            self._strays += 1
            if self._strays >= MAX_STRAYS:
                raise UsageError(
                    "an optimizer of er.epochs() has taken two steps in an epoch, and the loop has read no "
                    "batch of its loader there, so no step could be counted. Give er.epochs() the loader of "
                    "the loop, and begin to read it within the loop over the epochs."
                )

    def _find_loop(self) -> None:
        """Take another iterator for the loop's, if the first one was only looked into and is still there."""
        iterator = self._find_loop_iterator()
        newest = self._newest_iterator() if self._newest_iterator else None
        if newest is None or newest is iterator or newest.is_over or newest.epoch != self._epoch:
            return
        if iterator is not None and not iterator.has_trained:
            self._loop_iterator, self._batches = weakref.ref(newest), newest.batches
            self._newest_read = self._newest_read.then(NewestRead.OF_LOOP)

    @property
    def is_broken(self) -> bool:
        """Whether an exception is being handled in a step that is not counted yet."""
        error = sys.exc_info()[1]
        is_begun = self.has_stepped or self._batches > 0
        return is_begun and error is not None and error is not self._outer_error

    # ---- what the loop over epochs or steps calls --------------------------------------------------------

    def begin_epoch(self) -> None:
        """Begin an epoch; what an interrupted one has left is forgotten."""
        self._thread = threading.get_ident()
        self._state, self._newest_read = EpochState.OPEN, NewestRead.OF_LOOP
        self._strays, self._outer_error = 0, sys.exc_info()[1]
        self._epoch += 1
        self._loop_iterator = self._newest_iterator = None
        self.has_stepped = False
        self._batches = self._held = 0

    def end_epoch(self) -> None:
        """Count the step that is open, when the loop asks for the next epoch.

        Raises:
            UsageError: the loop reads another number of batches per step than is expected, or none.

        """
        self.end_step(must_decide=True)
        ended, self._state = self._state, EpochState.CLOSED
        if self._held:
            raise UsageError(self._describe_unexpected(self._count_batches()))
        was_read = ended in {EpochState.LOOKED_THROUGH, EpochState.TRAINED}
        if was_read and not self._is_known:
            raise UsageError(
                "an epoch is over, and no optimizer of er.epochs() has taken a step, so nothing would be "
                "saved. Pass all optimizers of the loop as optimizer=, in a dict if they are several."
            )

    def begin_step(self) -> None:
        """Begin a step of a loop that draws its batches itself."""
        self.begin_epoch()
        self._batches = 1

    def end_open_step(self) -> None:
        """Count the step that `begin_step` has begun, unless a save has counted it."""
        self._state = EpochState.CLOSED
        if self._batches:
            self.has_stepped = True
            self.end_step()

    def end_step(self, *, must_decide: bool = False) -> None:
        """Count what was read up to the last optimizer step, if there was one since the last boundary.

        With ``must_decide`` refuse a number of batches that only later steps could explain.

        Raises:
            UsageError: the loop reads another number of batches per step than is expected.

        """
        self._check_schedules()
        if not self.has_stepped:
            return
        self.has_stepped = False
        batches, self._batches = self._batches, 0
        if not batches:  # an optimizer that steps once more, at the end of an epoch
            return
        expected = self._count_batches()
        if batches == expected and not self._held:
            self._unexpected.clear()
            self._get_marks()[IS_KNOWN] = True
            self._finish(1)
            return
        self._held += batches
        self._unexpected.append(batches)
        if self._is_known and not self._held % expected and len(self._unexpected) < MAX_SKIPPING:
            self._finish_held(expected)
        elif must_decide or len(self._unexpected) >= MAX_UNEXPECTED:
            raise UsageError(self._describe_unexpected(expected))

    def note_save(self) -> None:
        """Note that the script has saved the state, perhaps within the body of its loop."""
        self._saved_counts = {name: item.last_epoch for name, item in self._schedulers.items()}

    def _check_schedules(self) -> None:
        """Warn if a scheduler has stepped between a save and the end of the loop's body."""
        saved, self._saved_counts = self._saved_counts, {}
        late = [name for name, count in saved.items() if self._schedulers[name].last_epoch != count]
        if late:
            logger.warning(
                f"WARNING: {late[0]} stepped after run.save() and before the loop's next batch, so the "
                "checkpoint lacks that: call run.save() after all that belongs to the step."
            )

    @property
    def _is_known(self) -> bool:
        return bool(self._get_marks().get(IS_KNOWN))

    def _finish_held(self, expected: int) -> None:
        held, self._held = self._held, 0
        self._finish(held // expected)

    def _describe_unexpected(self, expected: int) -> str:
        counts = self._unexpected
        each = format_count(expected, "batch", "batches")
        if len(set(counts)) == 1 and counts[0] != expected:
            remedy = f"Leave accumulate= or micro_batch= out, or take a step per {each}."
            if counts[0] > 1:
                remedy = (
                    f"If it accumulates gradients, {self._explain(counts[0])} If it takes steps on batches "
                    "that it has read before, use er.resume() and run.step()."
                )
            return (
                f"the loop takes one optimizer step per {format_count(counts[0], 'batch', 'batches')} of its "
                f"loader, and er.epochs() expects one per {each}. {remedy}"
            )
        return (
            f"two optimizer steps came after {' and '.join(map(str, counts[-2:]))} batches of the loader, "
            f"and er.epochs() expects {each} for each. A loop that reads ahead of its steps, or that leaves "
            "out the first batch that it reads, must count them itself: use er.resume() and run.step()."
        )

    # ---- what the loader calls ---------------------------------------------------------------------------

    def read(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return an iterator over the loader whose requests end steps, if it is that of the loop."""
        is_loop = self._begin_reading()
        iterator = _LoaderIterator(self, make_iterator(), self._epoch)
        if is_loop:
            self._loop_iterator, self._batches = weakref.ref(iterator), 0
        return iterator

    def _begin_reading(self) -> bool:
        """Return whether an iterator that begins now is that of the loop. Another one evaluates.

        The loop's first iterator is its own, and so is one that follows an iterator that the loop has left.
        """
        if self._is_of_other_read():
            return False
        iterator = self._find_loop_iterator()
        if self._state is EpochState.TRAINED or not (iterator is None or iterator.is_over):
            return False
        self.end_step()
        return True

    def before_batch(self, iterator: _LoaderIterator) -> None:
        """End the step before ``iterator`` is asked for a batch."""
        if self._is_of_other_read():
            return
        if iterator.epoch != self._epoch:
            raise UsageError(
                "the loop goes on with an iterator over its loader that was made before this epoch. A resume "
                "would not find its place: write `for batch in loader` within the loop over er.epochs()."
            )
        if iterator is self._find_loop_iterator():
            self.end_step()

    def after_batch(self, iterator: _LoaderIterator) -> None:
        """Count a batch that ``iterator`` has returned."""
        iterator.batches += 1
        self._newest_iterator = weakref.ref(iterator)
        if iterator is self._find_loop_iterator():
            self._batches += 1
            self._newest_read = self._newest_read.then(NewestRead.OF_LOOP)
        elif self._state is not EpochState.CLOSED:
            self._newest_read = self._newest_read.then(NewestRead.OF_SECOND_ITERATOR)

    def after_last_batch(self, iterator: _LoaderIterator) -> None:
        """Count the batches at the end of an epoch that the loop has skipped."""
        iterator.is_over = True
        if self._state is EpochState.CLOSED or iterator is not self._find_loop_iterator():
            return
        self._state = self._state.end_iterator(has_trained=iterator.has_trained)
        expected = self._count_batches()
        left = self._held + self._batches
        if left and iterator.has_trained and self._is_known and not left % expected:
            self._batches, self._held = 0, left
            self._finish_held(expected)

    def _find_loop_iterator(self) -> _LoaderIterator | None:
        return None if self._loop_iterator is None else self._loop_iterator()

    def _is_of_other_read(self) -> bool:
        """Return whether a read is not the loop's: between epochs, or of another thread, which is noted."""
        if self._state is EpochState.CLOSED:
            return True
        if threading.get_ident() == self._thread:
            return False
        self._newest_read = NewestRead.OF_OTHER_THREAD
        return True


class _LoaderIterator(Iterator[Any]):
    """One iteration over the loader."""

    def __init__(self, counter: StepCounter, inner: Iterator[Any], epoch: int) -> None:
        self._counter, self._inner, self.epoch = counter, inner, epoch
        self.is_over = self.has_trained = False
        self.batches = 0  # returned so far

    def __next__(self) -> Any:
        self._counter.before_batch(self)
        try:
            batch = next(self._inner)
        except StopIteration:
            self._counter.after_last_batch(self)
            raise
        self._counter.after_batch(self)
        return batch
