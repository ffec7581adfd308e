"""Measure the own time of each step: how long this rank works until the ranks wait for each other.

The own time is from the end of `run.step` to the first gradient of the next backward pass. DDP sends no
gradient before that one. It includes what the script does between two steps, the wait for data and the
forward pass. It leaves out DDP's broadcast of buffers before the forward pass, which waits for other ranks.

A step with another collective within this time is not measured, nor is one without that gradient. On a GPU
events are recorded and read some steps later, so nothing waits for the GPU.
"""

from __future__ import annotations

import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

WINDOW_STEPS = 100
MIN_MEASURED_STEPS = WINDOW_STEPS // 2
STEPS_PER_UPDATE = 10
MAX_POINTS = 64  # of one step; an evaluation may broadcast buffers often


class CpuClock:
    """The time of the host, in nanoseconds."""

    mark = staticmethod(time.perf_counter_ns)

    @staticmethod
    def measure_us(start: int, end: int) -> float | None:
        """Return the time between two marks."""
        return (end - start) / 1e3


class CudaClock:
    """The time of a GPU's current stream; a mark is an event in it."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """``cuda`` is torch.cuda, or a test's replacement."""
        self._device = device
        self._cuda = cuda

    def mark(self) -> Any:
        """Record an event; return None while a CUDA graph is captured, which would keep the event."""
        if self._cuda.is_current_stream_capturing():
            return None
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    @staticmethod
    def measure_us(start: Any, end: Any) -> float | None:
        """Return the time between two marks; None if the GPU has not reached both."""
        if start is None or end is None or not (start.query() and end.query()):
            return None
        return float(start.elapsed_time(end)) * 1e3


Point = tuple[Any, int]
"""A mark of the clock, and the number of collectives that this rank had started."""


class OwnTime:
    """The own times of this rank's newest steps, in one generation.

    A step only notes points: the start, the start and end of each pause, and the end. So their number is odd
    while the time runs. They are read after `STEPS_PER_UPDATE` steps.
    """

    def __init__(self, record: Callable[[int], None], count_collectives: Callable[[], int]) -> None:
        """``record`` takes the median of the newest steps in microseconds; 0: too few were measured."""
        self._record = record
        self._count_collectives = count_collectives
        self._clock: CpuClock | CudaClock | None = None
        self._devices: set[torch.device] = set()
        self._hooks: dict[int, RemovableHandle] = {}
        self._points: list[Point] = []
        self._unread_steps: list[list[Point]] = []
        self._times_us: deque[float | None] = deque(maxlen=WINDOW_STEPS)

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Measure steps that train ``ddp``. A second call for it does nothing, nor one for another device."""
        parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        devices = {parameter.device for parameter in parameters}
        if _own_times.get(ddp) is self or len(devices | self._devices) != 1:
            return
        (device,) = self._devices = devices
        if device.type not in {"cpu", "cuda"}:
            return
        self._clock = self._clock or (CpuClock() if device.type == "cpu" else CudaClock(device))
        _own_times[ddp] = self
        ddp._sync_buffers = types.MethodType(_sync_buffers, ddp)  # type: ignore[method-assign]  # noqa: SLF001
        for parameter in parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._end)
            self._hooks[id(parameter)] = hook

    def end_step(self) -> None:
        """Begin the own time of the next step; read the times of earlier ones when an update is due."""
        if self._clock is None:
            return
        if len(self._unread_steps) > STEPS_PER_UPDATE:
            self._update()
        self._points = [(self._clock.mark(), self._count_collectives())]
        self._unread_steps.append(self._points)

    def pause(self) -> bool:
        """Leave out the time until `resume`, in which ranks wait; return whether `resume` is due."""
        is_due = len(self._points) % 2 == 1 and len(self._points) < MAX_POINTS
        if is_due:
            self.resume()
        return is_due

    def resume(self) -> None:
        """Go on after a pause."""
        if self._clock is not None:
            self._points.append((self._clock.mark(), self._count_collectives()))

    def close(self) -> None:
        """Measure no more."""
        self._clock, self._points = None, []
        for hook in self._hooks.values():
            hook.remove()

    def _end(self, parameter: Tensor) -> None:
        """End the own time at the first gradient; from then on, only its parameter keeps the hook."""
        if self._clock is None or len(self._points) % 2 == 0:
            return
        self._points.append((self._clock.mark(), self._count_collectives()))
        if len(self._hooks) > 1:
            kept = self._hooks.pop(id(parameter))
            for hook in self._hooks.values():
                hook.remove()
            self._hooks = {id(parameter): kept}

    def _update(self) -> None:
        """Read all steps but the last, which a GPU may not have reached, and record the median."""
        *read, last = self._unread_steps
        self._unread_steps = [last]
        self._times_us.extend(map(self._measure_us, read))
        if len(self._times_us) == WINDOW_STEPS:
            times = sorted(time_us for time_us in self._times_us if time_us is not None)
            self._record(int(times[len(times) // 2]) if len(times) >= MIN_MEASURED_STEPS else 0)

    def _measure_us(self, points: list[Point]) -> float | None:
        """Return a step's own time; None without an end, or if it may have waited for other ranks."""
        if self._clock is None or len(points) % 2 or len(points) >= MAX_POINTS:
            return None
        total_us = 0.0
        for (start, collectives), (end, collectives_then) in zip(points[::2], points[1::2], strict=True):
            part_us = self._clock.measure_us(start, end)
            if part_us is None or collectives != collectives_then:
                return None
            total_us += part_us
        return total_us


_own_times: weakref.WeakKeyDictionary[nn.Module, OwnTime] = weakref.WeakKeyDictionary()


def _sync_buffers(ddp: DistributedDataParallel) -> None:
    """Run DDP's broadcast of buffers outside the own time.

    It replaces the method of this name in one wrapper. So copies of the wrapper get one of their own, and
    pickle stores the name alone.
    """
    own_time = _own_times.get(ddp)
    is_paused = own_time is not None and own_time.pause()
    DistributedDataParallel._sync_buffers(ddp)  # noqa: SLF001
    if own_time is not None and is_paused:
        own_time.resume()
