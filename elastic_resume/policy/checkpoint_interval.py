"""Decide how often to take a snapshot and to commit one to disk, and what is due at a step boundary.

``auto`` follows Young's first-order optimum (J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006).
Let a save cost training w seconds, let the mean time between failures be M seconds, and let a recovery take u
seconds. Saves at an interval of x seconds leave this share of the time:

    (1 - (u + x/2) / M) / (1 + w/x)        greatest, to first order, at  x = sqrt(2 w M) - w.

From w = M/2 on the formula decreases again, because the approximation has ended. There its greatest value,
M/2, is used. A cost, a step time or a failure count that is zero, infinite or NaN gives a result within the
bounds below, never an error.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass

from elastic_resume.errors import ConfigError
from elastic_resume.units import parse_duration

# Assumed until the job has had failures: one in four hours, similar to Llama 3's 16k-GPU run (one in 2.7 h)
# and to unreliable spot instances. An interval depends on the square root only.
ASSUMED_MTBF_S = 4 * 3600.0
MAX_OVERHEAD_SHARE = 0.01  # share of the training time that snapshots may take
MAX_SNAPSHOT_INTERVAL_S = 60.0  # at most one minute of steps is recomputed after a failure
MAX_SAVE_INTERVAL_S = 600.0  # at most ten minutes after the loss of all nodes at once
MAX_DISK_DUTY = 0.1  # share of the disk's time; the data loader, logs and other jobs need the rest
_MAX_S = 1e12  # 30,000 years; stands for infinity, since infinity times 0 would be NaN
_MIN_STEP_S = 1e-9


@dataclass(frozen=True)
class IntervalSetting:
    """An interval: a number of steps, a number of seconds, ``off``, or ``auto`` if nothing is given."""

    steps: int | None = None
    seconds: float | None = None
    is_off: bool = False

    @classmethod
    def parse(
        cls, text: object, setting: str = "save-every", *, allow_off: bool = False, allow_seconds: bool = True
    ) -> IntervalSetting:
        """Parse ``100`` (steps), ``30s``, ``5m``, ``1.5h``, ``auto`` or ``off``.

        Args:
            text: the value.
            setting: name of the setting, for the error.
            allow_off: whether ``off`` is allowed.
            allow_seconds: whether a time is allowed; nodes do not measure time alike.

        Raises:
            ConfigError: the text has another form, or is not positive.
        """
        text = str(text).strip()
        if text == "auto":
            return cls()
        if text == "off" and allow_off:
            return cls(is_off=True)
        if re.fullmatch(r"\d{1,12}", text) and int(text) > 0:
            return cls(steps=int(text))
        if allow_seconds and text[-1:].isalpha():  # a number without a unit counts steps
            with contextlib.suppress(ConfigError):
                return cls(seconds=parse_duration(setting, text, min_s=0.001))
        times, off = ["a time (30s, 5m)"] * allow_seconds, ["off"] * allow_off
        forms = ["a number of steps (100)", *times, "auto", *off]
        raise ConfigError(f"{setting} is {text[:100]!r}: write {', '.join(forms[:-1])} or {forms[-1]}.")

    def __str__(self) -> str:
        """Format it as `parse` reads it."""
        if self.is_off:
            return "off"
        if self.steps is not None:
            return str(self.steps)
        return "auto" if self.seconds is None else f"{self.seconds:.12g}s"


AUTO = IntervalSetting()


@dataclass(frozen=True)
class SaveCost:
    """The cost of the last save to disk.

    ``stall_s`` is the wait of the training thread. ``commit_s`` is the time from the first byte to the
    commit. ``cpu_s`` is the processor time of digests and writes, on a node with ``cores`` usable cores.
    """

    stall_s: float
    commit_s: float = 0.0
    cpu_s: float = 0.0
    cores: float = 1.0

    @property
    def training_cost_s(self) -> float:
        """Return the seconds of training that a save costs: the stall, and its share of the cores."""
        cores = max(_clamp_seconds(self.cores), 1.0)
        return _clamp_seconds(self.stall_s) + _clamp_seconds(self.cpu_s) / cores


def estimate_mtbf_s(failures: int, uptime_s: float) -> float:
    """Estimate the mean time between failures.

    One assumed failure per `ASSUMED_MTBF_S` is added to the observed ones (the posterior mean of a rate whose
    prior weighs one failure). So a job without failures has a finite estimate, and a first failure in the
    first minute does not dominate it.
    """
    return (_clamp_seconds(uptime_s) + ASSUMED_MTBF_S) / (max(failures, 0) + 1)


def optimal_interval_s(cost_s: float, mtbf_s: float = ASSUMED_MTBF_S) -> float:
    """Return the seconds between two saves that cost ``cost_s`` each (see the module's docstring).

    The interval never shrinks when a save costs more or failures are rarer.
    """
    between = _clamp_seconds(mtbf_s)
    cost = min(_clamp_seconds(cost_s), between / 2)
    return math.sqrt(2 * cost * between) - cost


def snapshot_interval_steps(
    setting: IntervalSetting, *, step_s: float | None, cost_s: float | None, mtbf_s: float = ASSUMED_MTBF_S
) -> int:
    """Return the steps between two snapshots, at least 1. The setting must not be ``off``.

    The result is a power of two, unless a number of steps is given. So nodes that measure different costs
    still share steps: after a failure they load the same step, and nothing is sent.

    ``auto`` takes the shorter of two intervals: the one at which snapshots cost `MAX_OVERHEAD_SHARE`, and
    Young's optimum. It never exceeds `MAX_SNAPSHOT_INTERVAL_S`, or one step if that takes longer.

    Args:
        setting: a number of steps is returned as it is. Seconds are an upper bound, except when one step
            takes longer.
        step_s: seconds per step without a snapshot; None if not measured yet.
        cost_s: seconds that a snapshot adds to training; None if not measured yet.
        mtbf_s: mean time between failures in seconds, from `estimate_mtbf_s`.
    """
    if setting.steps is not None:
        return setting.steps
    if step_s is None or not step_s > 0:
        return 1  # nothing is known: the first snapshots measure it
    step = max(_clamp_seconds(step_s), _MIN_STEP_S)
    if setting.seconds is not None:
        return _power_of_two_steps_within(setting.seconds, step)
    if cost_s is None or math.isnan(cost_s):
        return 1
    interval = min(_clamp_seconds(cost_s) / MAX_OVERHEAD_SHARE, optimal_interval_s(cost_s, mtbf_s))
    # Round up to limit the cost, then cap at the time bound.
    wanted = max(1, math.ceil(interval / step * (1 - 1e-9)))  # in floats 0.9 / 0.03 is more than 30
    return min(1 << (wanted - 1).bit_length(), _power_of_two_steps_within(MAX_SNAPSHOT_INTERVAL_S, step))


def next_snapshot_step(step: int, interval_steps: int) -> int:
    """Return the step of the next snapshot after ``step``: the next multiple of the interval."""
    return (step // interval_steps + 1) * interval_steps


def commit_interval_s(cost: SaveCost, mtbf_s: float = ASSUMED_MTBF_S) -> float:
    """Return the seconds between two commits under ``auto``.

    It is Young's optimum, at most `MAX_SAVE_INTERVAL_S`. If commits take long, it grows beyond that bound, so
    that the disk works for `MAX_DISK_DUTY` of the time at most.
    """
    wanted = min(optimal_interval_s(cost.training_cost_s, mtbf_s), MAX_SAVE_INTERVAL_S)
    return max(wanted, _clamp_seconds(cost.commit_s) / MAX_DISK_DUTY)


def is_commit_due(
    setting: IntervalSetting,
    *,
    step: int,
    committed_step: int,
    elapsed_s: float,
    cost: SaveCost | None,
    mtbf_s: float = ASSUMED_MTBF_S,
) -> bool:
    """Return whether to commit after ``step``.

    A number of steps means its multiples, the same on every node. So after a failure all nodes hold the same
    step and nothing is sent. A multiple that passed while the disk was busy is committed afterwards.

    Args:
        setting: how often to commit.
        step: steps finished so far.
        committed_step: the step last committed by this process, or resumed from.
        elapsed_s: seconds since that commit or resume.
        cost: cost of the last commit; None before the first one.
        mtbf_s: mean time between failures in seconds.
    """
    if step <= committed_step or setting.is_off:
        return False
    if setting.steps is not None:
        return step // setting.steps > committed_step // setting.steps
    if setting.seconds is not None:
        return elapsed_s >= setting.seconds
    # The first commit comes after the first step, so that a state that cannot be stored fails early.
    return cost is None or elapsed_s >= commit_interval_s(cost, mtbf_s)


def _clamp_seconds(value: float) -> float:
    """Return ``value`` as a finite, non-negative number of seconds; 0 for NaN."""
    return 0.0 if math.isnan(value) else min(max(value, 0.0), _MAX_S)


def _power_of_two_steps_within(bound_s: float, step_s: float) -> int:
    """Return the greatest power of two of steps that take at most ``bound_s``; 1 if one step takes longer."""
    steps = int(_clamp_seconds(bound_s) / step_s)
    return 1 << max(0, steps.bit_length() - 1)


# ---- at a step boundary --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepBoundary:
    """What the local leader knows when a step has ended.

    ``announced_step`` is the step at which all local ranks expect the next snapshot; None if there is to be
    none. ``slot_count`` is the number of slots that fit into the node's memory. ``is_sharded``: no
    local rank can take a snapshot alone, since each holds other shards of the state. ``is_end_planned``: the
    view is to end soon, so each step is to have a snapshot.
    """

    step: int
    announced_step: int | None
    slot_count: int
    snapshots_off: bool = False
    is_commit_due: bool = False
    is_reading_due: bool = False
    is_epoch_over: bool = False
    is_sharded: bool = False
    is_drained: bool = False
    is_end_planned: bool = False

    @property
    def takes_snapshots(self) -> bool:
        """Whether snapshots are taken for their own sake, and not for commits only."""
        return self.slot_count > 1 and not self.snapshots_off

    @property
    def is_expected(self) -> bool:
        """Whether the other local ranks expect a snapshot now, and wait for its slot.

        After an epoch's end a sharded model takes a second snapshot of its last step. All ranks know that, so
        it is not announced.
        """
        if self.is_epoch_over:
            return self.is_sharded
        return self.announced_step is not None and self.step >= self.announced_step


@dataclass(frozen=True)
class BoundaryActions:
    """What to do now.

    ``is_read``: mechanisms of the agent read the snapshot. ``leader_only``: the local leader copies alone,
    because the other ranks do not expect this snapshot. ``announces``: the local leader then announces the
    step of the next snapshot. ``announces_next_step``: none is taken now, and the local leader announces one
    of the next step, which needs all local ranks.
    """

    takes_snapshot: bool = False
    commits: bool = False
    is_read: bool = False
    leader_only: bool = False
    announces: bool = False
    announces_next_step: bool = False
    writes_directly: bool = False


def decide_actions(boundary: StepBoundary) -> BoundaryActions:
    """Decide what to do at a step boundary.

    With fewer than two slots, or with snapshots off, a snapshot serves a commit or a drain only. Without any
    slot the state goes to disk directly. Mechanisms never read the second snapshot of an epoch's last step. A
    snapshot that needs all local ranks is taken only at a step at which they expect it.
    """
    commits, is_expected = boundary.is_commit_due, boundary.is_expected
    if boundary.slot_count == 0:
        return BoundaryActions(writes_directly=commits)
    is_possible = is_expected or not boundary.is_sharded
    is_snapshot_due = is_read = False
    if boundary.takes_snapshots:
        is_snapshot_due = (
            is_expected
            or boundary.is_epoch_over
            or boundary.is_end_planned
            or boundary.announced_step is None
        )
        is_read = boundary.is_reading_due and is_possible and not boundary.is_epoch_over
    if not (is_snapshot_due or commits or is_read or boundary.is_drained):
        return BoundaryActions()
    if not is_possible:
        return BoundaryActions(announces_next_step=True)
    return BoundaryActions(
        takes_snapshot=True,
        commits=commits,
        is_read=is_read,
        leader_only=not is_expected,
        announces=boundary.takes_snapshots,
    )
