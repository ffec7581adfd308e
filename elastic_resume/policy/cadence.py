"""How often a checkpoint is written. Pure: times and costs come in as numbers.

``auto`` follows Young's first-order optimum (J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006):
with a save that stalls training for w seconds and a mean time between failures of M seconds, the time
lost to saving plus the time lost to repeating is least at an interval of sqrt(2 w M) - w.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from elastic_resume.errors import ConfigError

# Before a job has seen failures of its own: one in four hours, the order of Llama 3's 16k-GPU run
# (one in 2.7 h) and of flaky spot pools. An interval depends on its square root only.
ASSUMED_MTBF_S = 4 * 3600.0
LONGEST_INTERVAL_S = 600.0  # whatever a save costs, ten minutes is the most that a failure may repeat
LARGEST_SHARE = 0.01  # of the training time that saves may stall, as long as the line above allows it


@dataclass(frozen=True)
class SaveEvery:
    """``--save-every``: a number of steps, a number of seconds, or (both None) auto."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> SaveEvery:
        """Read ``100``, ``30s``, ``1.5s`` or ``auto``.

        Raises:
            ConfigError: anything else, zero and negative numbers included.

        """
        text = str(text).strip()
        if text == "auto":
            return cls()
        if re.fullmatch(r"\d{1,12}", text) and int(text) > 0:
            return cls(steps=int(text))
        match = re.fullmatch(r"(\d+(?:\.\d+)?)s", text)
        if match and 0 < float(match[1]) < 1e9:
            return cls(seconds=float(match[1]))
        raise ConfigError(
            f"save-every is {text!r}: write a number of steps (100), a number of seconds (30s) or auto."
        )

    def __str__(self) -> str:
        """Give back the form that `parse` reads."""
        if self.steps is not None:
            return str(self.steps)
        return "auto" if self.seconds is None else f"{self.seconds:.12g}s"


def auto_interval_s(stall_s: float, mtbf_s: float = ASSUMED_MTBF_S) -> float:
    """Seconds between two saves that each stall training for ``stall_s`` (see the module's docstring)."""
    young = math.sqrt(2 * stall_s * mtbf_s) - stall_s
    return min(max(young, stall_s / LARGEST_SHARE), LONGEST_INTERVAL_S)


def is_due(every: SaveEvery, *, step: int, saved_step: int, since_s: float, stall_s: float | None) -> bool:
    """Whether to save after ``step``.

    Args:
        every: the setting.
        step: steps finished so far.
        saved_step: the step last saved by this process, or resumed from.
        since_s: seconds since that save or resume.
        stall_s: seconds that the last save held up training; None before the first one.

    A number of steps means multiples of it, on every node the same ones, so that after a failure all
    nodes hold the same step and nothing is sent. One that passed while the disk was busy is made up for.

    """
    if step <= saved_step:
        return False
    if every.steps is not None:
        return step // every.steps > saved_step // every.steps
    if every.seconds is not None:
        return since_s >= every.seconds
    # The first save comes after the first step: what cannot be stored is told now, not in an hour.
    return stall_s is None or since_s >= auto_interval_s(stall_s)
