"""Check in a generation's first steps that a script calls things in an order that a resume can repeat.

A saved state is that of `run.step()`. What changes between it and the next `optimizer.step()` is not in it:
the resumed loop repeats the change, or leaves it out. Only rank 0 checks, and only warns.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.restore.coordinator import ResumeResult
from elastic_resume.state.state_dict import RESERVED_PREFIX
from elastic_resume.training.changed_modules import ChangedModules
from elastic_resume.training.own_positions import OwnPositions
from elastic_resume.training.untracked import (
    UntrackedOptimizerCheck,
    describe_unknown_loader,
    find_untracked,
    list_checked_objects,
    require_tracked_parameters,
)

logger = logging.getLogger(__name__)

CHECKED_STEPS = 4
STANDARD_NAMES = {"scheduler", "scaler", "data", "ema"}

Marks = dict[str, Any]  # setting or count -> value


class FirstSteps:
    """What rank 0 checks in the first steps of a generation."""

    def __init__(
        self,
        tracked: Mapping[str, Any],
        batches: GlobalBatches | None,
        result: ResumeResult,
        rank: int,
        log_enumerate_hint: Callable[[], None],
    ) -> None:
        """Begin to check, on rank 0. A restart by the agent repeats no warning but those about optimizers."""
        self._tracked, self._batches = tracked, batches
        self._log_enumerate_hint = log_enumerate_hint
        self.is_loop_over_epochs = False  # of the script's own; a library's loop has its own index
        self.is_loop_of_script = False  # over epochs or steps
        self._later_checks: list[ChangedModules | OwnPositions] = []  # they look at the fourth step again
        self._has_index = False  # of `run.enumerate`, which is right in a resumed epoch
        is_start = result.plan.kind == "cold" or result.earlier_command is not None
        self._is_new_start = rank == 0 and is_start
        self._untracked_optimizers = UntrackedOptimizerCheck(tracked) if rank == 0 else None
        self._order = CallOrder(tracked) if self._is_new_start else None
        self._steps = 0

    def note_position_read(self) -> None:
        """Note that the script has read `run.position`: it may compute a learning rate from it."""
        if self._order is not None:
            self._order.is_position_read = True

    def note_counted_steps(self) -> None:
        """Note that a step ends when the loop asks for its next batch: what follows belongs to the next."""
        if self._order is not None:
            self._order.is_counted_by_requests = True

    def note_enumerate(self) -> None:
        """Note that the script takes the index of its loop from `run.enumerate`."""
        self._has_index = True
        self.note_position_read()

    def begin_epoch(self) -> None:
        """Let the script change what it likes between two epochs."""
        if self._order is not None:
            self._order.begin_epoch()

    def end_step(self) -> None:
        """Check what `run.step` shows."""
        self._steps += 1
        if self._steps == 1 and self.is_loop_over_epochs and not self._has_index:
            self._log_enumerate_hint()
        if self._order is not None:
            self._order.end_step()
            if self._steps >= CHECKED_STEPS:
                self._end_checks()
        if self._steps > 1 or not self._is_new_start:
            return
        require_tracked_parameters(self._tracked)  # also of groups that were added since
        with _without_failing():
            self._check_objects()
        if self._batches is not None and not (self._batches.iterators or self._batches.handed_out):
            logger.warning(
                "WARNING: the first step has read no batch of data=. If the loop reads another loader, a "
                "resume continues at a wrong sample: pass the loader of the loop to er.resume()."
            )

    def _check_objects(self) -> None:
        """Name objects of this process that the state lacks, and prepare to compare others later."""
        objects = list_checked_objects()
        self._later_checks.append(ChangedModules(self._tracked, objects))
        texts = find_untracked(self._tracked, objects, has_data="data" in self._tracked)
        has_own_position = "data" in self._tracked and self._batches is None  # as a stream
        if self.is_loop_of_script and not has_own_position:
            texts.append(describe_unknown_loader(objects, has_batches=self._batches is not None))
            if self._batches is None:
                self._later_checks.append(OwnPositions(self._tracked))
        for text in filter(None, texts):
            logger.warning(f"WARNING: {text}")

    def _end_checks(self) -> None:
        for check in self._later_checks:
            with _without_failing():
                for text in check.describe():
                    logger.warning(f"WARNING: {text}")
        self._close_order()

    def _close_order(self) -> None:
        self._later_checks.clear()
        if self._order is not None:
            self._order.close()
            self._order = None

    def close(self) -> None:
        """Stop checking."""
        if self._untracked_optimizers is not None:
            self._untracked_optimizers.close()
        self._close_order()


@contextlib.contextmanager
def _without_failing() -> Iterator[None]:
    """Let a check that only warns end no job: it looks at any object of the process."""
    try:
        yield
    except Exception:
        logger.debug("a check of the first steps has failed.", exc_info=True)


class CallOrder:
    """Compares settings and schedules at the end of a step with those at the next optimizer step."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        self._optimizers = {name: item for name, item in tracked.items() if isinstance(item, Optimizer)}
        self._schedulers = {
            name: item
            for name, item in tracked.items()
            if isinstance(item, LRScheduler) or name.split(".")[0] == "scheduler"
        }
        # Settings may be computed from a counter of the script, which is restored.
        self._has_own_state = any(
            name.split(".")[0] not in STANDARD_NAMES
            and not name.startswith(RESERVED_PREFIX)
            and not isinstance(item, (nn.Module, Optimizer, LRScheduler))
            for name, item in tracked.items()
        )
        self.marks: Marks | None = None
        self.is_position_read = False
        self.is_counted_by_requests = False  # then a scheduler may step at the top of the loop's body
        self._has_position = False  # read before the first step, from which the script may count on
        self._has_stepped = False
        self._gradients: list[tuple[Tensor, Tensor, int]] = []  # parameter, gradient, its version
        self._has_warned = False
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._gradients.clear()

    def begin_epoch(self) -> None:
        """Let the script change what it likes between two epochs."""
        self.marks = None

    def end_step(self) -> None:
        """Note the state of a step boundary."""
        self._gradients.clear()
        if not self._has_stepped:
            parameters = (
                p
                for item in self._optimizers.values()
                for group in item.param_groups
                for p in group["params"]
            )
            found = next((p for p in parameters if p.grad is not None), None)
            if found is not None and found.grad is not None:
                self._gradients.append((found, found.grad, found.grad._version))  # noqa: SLF001
        self.marks, self._has_stepped, self.is_position_read = self._read(), False, False

    def _after_optimizer(self, *_: Any) -> None:
        self._has_stepped = True

    def _before_optimizer(self, *_: Any) -> None:
        marks, self.marks = self.marks, None
        if not self._has_stepped:
            self._check_gradients()
        if marks is None:
            self._has_position = self._has_position or self.is_position_read
        elif not self._has_warned:
            self._compare(marks, self._read())

    def _check_gradients(self) -> None:
        """Warn if the optimizer steps with gradients that were there at `run.step`.

        A script that skips a step has new ones. One change of them in between may be clipping.
        """
        for parameter, gradient, version in self._gradients:
            if parameter.grad is gradient and gradient._version <= version + 1:  # noqa: SLF001
                self._warn(
                    "run.step() was called before optimizer.step(). A state that is saved there lacks the "
                    "step, and a resume skips it: call run.step() after optimizer.step()."
                )
        self._gradients.clear()

    def _compare(self, before: Marks, now: Marks) -> None:
        if self.is_counted_by_requests and self._schedulers:
            return
        changed = [key for key in now if key in before and before[key] != now[key]]
        schedules = [key for key in changed if key.split("/")[0] in self._schedulers]
        shown = [key for key in changed if not key.endswith("/_step_count")][:4]
        texts = ", ".join(f"{key} from {before[key]} to {now[key]}" for key in shown)
        # A schedule that advanced by its own count was not set from run.position.
        if any(key.endswith("/_step_count") or not self.is_position_read for key in schedules):
            self._warn(
                f"{texts}: changed between run.step() and the next optimizer.step(). A state that is saved "
                "at run.step() lacks the change, and a resume leaves it out: call scheduler.step() before "
                "run.step(), or after the epoch's last batch."
            )
        elif changed and not (
            schedules or self.is_position_read or self._has_position or self._has_own_state
        ):
            self._warn(
                f"{texts}: set between run.step() and the next optimizer.step(), by a script that has not "
                "read run.position. In a resumed epoch the loop's index starts at 0: compute it from "
                "run.position.step."
            )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(f"WARNING: {text}")

    def _read(self) -> Marks:
        marks: Marks = {}
        for name, item in self._optimizers.items():
            keys = dict.fromkeys(key for group in item.param_groups for key in group)
            for key in keys:
                values = [group.get(key) for group in item.param_groups]
                if all(type(value) in {int, float, tuple} for value in values):  # reading a tensor may wait
                    marks[f"{name}/{key}"] = values[0] if len(set(map(repr, values))) == 1 else values
        for name, item in self._schedulers.items():
            for key in ("last_epoch", "_step_count"):
                if isinstance(count := getattr(item, key, None), (int, float)):
                    marks[f"{name}/{key}"] = count
        return marks
