"""The order of calls in a generation's first steps: what is warned about, and what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic_resume.training.first_steps import CallOrder
from tests.support.state_image import Box

STEPS, IN_EPOCH = 8, 4


class Loop:
    """A training loop of two epochs; ``when`` are the script's actions by the moment in a step."""

    def __init__(self, *, tracks: bool = True, own: bool = False) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        tracked: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if tracks:
            tracked["scheduler"] = self.scheduler
        if own:
            tracked["count"] = Box(1)
        self.order = CallOrder(tracked)

    def run(self, when: dict[str, Callable[[Loop, int], object]]) -> None:
        """Train."""

        def act(moment: str, step: int) -> None:
            if moment in when:
                when[moment](self, step)

        act("begin", 0)
        for step in range(STEPS):
            if step % IN_EPOCH == 0:
                self.order.begin_epoch()
                act("epoch", step)
            act("top", step)
            if "skip" not in when or not when["skip"](self, step):
                self.model(torch.ones(1)).sum().backward()
                act("backward", step)
                if "run first" in when:
                    self.order.end_step()
                    act("between", step)
                self.optimizer.step()
            act("stepped", step)
            if "run first" not in when:
                self.order.end_step()
            self.optimizer.zero_grad()
            act("bottom", step)
            if (step + 1) % IN_EPOCH == 0:
                act("epoch end", step)
        self.order.close()


def set_rate(loop: Loop, step: int) -> None:
    """Set the learning rate by a formula."""
    loop.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)


def step_scheduler(loop: Loop, _: int) -> None:
    """Step the schedule."""
    loop.scheduler.step()


def read_position(loop: Loop, _: int) -> None:
    """Read run.position."""
    loop.order.is_position_read = True


def clip(loop: Loop, _: int) -> None:
    """Clip the gradients."""
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


def both(*actions: Callable[[Loop, int], object]) -> Callable[[Loop, int], object]:
    """Do several things."""
    return lambda loop, step: [action(loop, step) for action in actions]


def skip(loop: Loop, step: int) -> bool:
    """Compute gradients, and take no step at first, as a GradScaler does after an overflow."""
    if step < 2:
        loop.model(torch.ones(1)).sum().backward()
    return step < 2


ALWAYS: Callable[[Loop, int], object] = lambda *_: True  # noqa: E731
CASES: dict[str, tuple[dict[str, Callable[[Loop, int], object]], dict[str, bool], str]] = {
    "nothing": ({}, {}, ""),
    "scheduler before run.step": ({"stepped": step_scheduler}, {}, ""),
    "scheduler after run.step": (
        {"bottom": step_scheduler},
        {},
        "optimizer/lr from 0.1 to 0.05, scheduler/last_epoch from 0 to 1: changed between",
    ),
    "the same, with a log line": ({"bottom": both(step_scheduler, read_position)}, {}, "last_epoch from 0"),
    "untracked scheduler after run.step": (
        {"bottom": step_scheduler},
        {"tracks": False},
        "lr from 0.1 to 0.05",
    ),
    "scheduler after the epoch": ({"epoch end": step_scheduler}, {}, ""),
    "rate of the epoch": ({"epoch": set_rate}, {"tracks": False}, ""),
    "rate by an index": ({"top": set_rate}, {"tracks": False}, "optimizer/lr from 0.1 to 0.05: set between"),
    "rate by run.position": ({"top": both(read_position, set_rate)}, {"tracks": False}, ""),
    "rate by a count from run.position": ({"begin": read_position, "top": set_rate}, {"tracks": False}, ""),
    "rate by a tracked count": ({"top": set_rate}, {"tracks": False, "own": True}, ""),
    "rate before run.step": ({"stepped": set_rate}, {"tracks": False}, ""),
    "run.step first": ({"run first": ALWAYS}, {}, "run.step() was called before optimizer.step()"),
    "run.step first, then clipping": ({"run first": ALWAYS, "between": clip}, {}, "was called before"),
    "skipped step": ({"skip": lambda _, step: step == 0}, {}, ""),
    "skipped steps after backward": ({"skip": skip}, {}, ""),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_order_of_calls_is_warned_about_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """What a resume could not repeat is named with its values."""
    actions, arguments, told = CASES[case]
    Loop(**arguments).run(actions)
    warnings = [message for message in caplog.messages if message.startswith("WARNING")]
    assert len(warnings) == bool(told), warnings
    assert told in "".join(warnings)


def test_gradients_are_not_held_after_the_check() -> None:
    """They are freed when the next step has begun, and at the end."""
    loop = Loop()
    loop.model(torch.ones(1)).backward()
    loop.order.end_step()
    assert loop.order._gradients
    loop.order.close()
    assert not loop.order._gradients
