"""Where training stands: epochs, steps and samples, all finished, and the arithmetic of the next ones.

A position is counted at commit points and nowhere else, so that what is prefetched or half done never
enters it. Does not know what is saved, nor when.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_resume.errors import UsageError
from elastic_resume.store.manifest import Manifest, Position
from elastic_resume.worker import telling
from elastic_resume.worker.batches import GlobalBatches


class Progress:
    """The position of this generation, of one rank; all ranks count alike."""

    def __init__(
        self, manifest: Manifest | None, batches: GlobalBatches | None, accumulate: int, *, rank: int
    ) -> None:
        """Begin where the manifest says; at the beginning without one."""
        self.position = _start_position(manifest, batches)
        self.epoch_over = False  # whether all of the last epoch is done, what follows its last step too
        self._batches = batches
        self._accumulate = accumulate
        self._warns = rank == 0

    @property
    def loss_weight(self) -> float:
        """See `Run.loss_weight`."""
        batches, at = self._batches, self.position.step_in_epoch
        return batches.loss_weight(at) if batches is not None and at < len(batches) else 1.0

    @property
    def at_epochs_end(self) -> bool:
        """Whether the epoch has no batch left."""
        return self._batches is not None and self.position.step_in_epoch >= len(self._batches)

    def begin_epoch(self) -> int:
        """Have the data go on where the epoch stopped; give its number."""
        if self._batches is not None:
            self._batches.seek(self.position.epoch, self.position.step_in_epoch)
        return self.position.epoch

    def step(self) -> Position:
        """Count a step that is finished.

        Raises:
            UsageError: the epoch has no step left.

        """
        before, batches = self.position, self._batches
        stop = before.step_in_epoch + self._accumulate
        samples = before.samples
        if batches is not None:
            if self.at_epochs_end:
                raise UsageError(
                    f"run.step() was called {stop} times in epoch {before.epoch}, which has {len(batches)} "
                    "batches: write `for epoch in run.epochs(EPOCHS)`, and call step() once after each batch."
                )
            stop = min(stop, len(batches))
            samples += sum(batches.samples(k) for k in range(before.step_in_epoch, stop))
        self.position = Position(before.epoch, stop, before.step + 1, samples)
        self.epoch_over = False
        return self.position

    def end_epoch(self) -> None:
        """Count the epoch as done, with what the script does after its last step."""
        batches, at = self._batches, self.position.step_in_epoch
        if batches is not None and batches.exhausted and 0 < 2 * at <= len(batches) + 1:
            self._warn_of_accumulation(at, len(batches))
        self.position = self._next_epoch()
        self.epoch_over = True

    def settled(self) -> tuple[Position, bool]:
        """Where a resume goes on if nothing of the epoch is left to do, and whether its epoch is over."""
        if self.at_epochs_end:
            return self._next_epoch(), True
        return self.position, self.epoch_over

    def _next_epoch(self) -> Position:
        return replace(self.position, epoch=self.position.epoch + 1, step_in_epoch=0)

    def _warn_of_accumulation(self, counted: int, batches: int) -> None:
        """Say that positions are wrong. Not an error: a script may leave the loop early."""
        if self._warns:
            self._warns = False
            telling.say(
                f"WARNING: the loader was read to the end of its {batches} batches, and "
                f"run.step() counted {counted}. If one optimizer step reads several batches, say "
                "accumulate=N in resume(): else a resume in mid-epoch reads samples again."
            )


def _start_position(manifest: Manifest | None, batches: GlobalBatches | None) -> Position:
    if manifest is None:
        return Position(epoch=0, step_in_epoch=0, step=0, samples=0)
    position = manifest.position
    return position if batches is not None else replace(position, step_in_epoch=0)
