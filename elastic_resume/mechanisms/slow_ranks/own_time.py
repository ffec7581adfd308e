"""Measure the own time of each step: how long this rank works until the ranks wait for each other.

The own time is from the end of `run.step` to the first gradient of the next backward pass. DDP sends no
gradient before that one. It includes what the script does between two steps, the wait for data and the
forward pass. It leaves out DDP's broadcast of buffers before the forward pass, which waits for other ranks.

Every fifth step is measured, unless it has another collective within this time, or has no such gradient. On a
GPU events are recorded and read at least a step later, so nothing waits for the GPU.
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

from elastic_resume.mechanisms.mechanism import StepObserver, WorkerContext

WINDOW_STEPS = 100
STEPS_PER_SAMPLE = 5  # a hook and the points of a measured step take some 30 us
WINDOW_SAMPLES = WINDOW_STEPS // STEPS_PER_SAMPLE
MIN_MEASURED_SAMPLES = WINDOW_SAMPLES // 2
SAMPLES_PER_UPDATE = 2
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


def observe(context: WorkerContext) -> OwnTime:
    """Measure this rank's steps in a generation."""
    return OwnTime(context.record, context.count_collectives)


Point = tuple[Any, int]
"""A mark of the clock, and the number of collectives that this rank had started."""


class OwnTime(StepObserver):
    """The own times of this rank's newest steps, in one generation.

    While a step trains, points are noted: the start, each broadcast's start and end, and the end. They are
    read after `SAMPLES_PER_UPDATE` such steps.
    """

    def __init__(self, record: Callable[[int], None], count_collectives: Callable[[], int]) -> None:
        """``record`` takes the median of the newest steps in microseconds; 0: too few were measured."""
        self._record = record
        self._count_collectives = count_collectives
        self._device: torch.device | None = None
        self._mark: Callable[[], Any] = time.perf_counter_ns
        self._measure_us: Callable[[Any, Any], float | None] = CpuClock.measure_us
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks: dict[int, RemovableHandle] = {}
        self._first_parameter: Tensor | None = None  # Its gradient was the first.
        self._points: list[Point] = []  # of the step that trains; empty after its end
        self._unread_samples: list[list[Point]] = []
        self._times_us: deque[float | None] = deque(maxlen=WINDOW_SAMPLES)
        self._steps = 0

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Measure steps that train ``ddp``. A second call for it does nothing, nor one for another device."""
        parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        devices = {parameter.device for parameter in parameters} | ({self._device} if self._device else set())
        if ddp in self._watched or len(devices) != 1:
            return
        (device,) = devices
        if device.type not in {"cpu", "cuda"}:
            return
        clock = CpuClock() if device.type == "cpu" else CudaClock(device)
        self._device, self._mark, self._measure_us = device, clock.mark, clock.measure_us
        self._watched.add(ddp)
        # Copies of the wrapper get a method of their own, and pickle stores its name alone.
        ddp._sync_buffers = types.MethodType(self._sync_buffers, ddp)  # type: ignore[method-assign]  # noqa: SLF001
        for parameter in parameters:
            if id(parameter) not in self._hooks:  # it may be in two wrappers
                self._add_hook(parameter)

    def end_step(self, step: int) -> None:
        """Begin the own time of the next step."""
        del step
        self._points = []
        self._steps += 1
        if self._device is None or self._steps % STEPS_PER_SAMPLE:
            return
        if len(self._unread_samples) > SAMPLES_PER_UPDATE:
            self._update()
        if self._first_parameter is not None:
            self._remove_hooks()
            self._add_hook(self._first_parameter)
        self._points = [(self._mark(), self._count_collectives())]
        self._unread_samples.append(self._points)

    def close(self) -> None:
        """Measure no more."""
        self._device, self._points, self._first_parameter = None, [], None
        self._remove_hooks()
        for ddp in self._watched:  # its method refers to this object, and by it to the whole generation
            vars(ddp).pop("_sync_buffers", None)

    def _sync_buffers(self, ddp: DistributedDataParallel) -> None:
        """Run DDP's broadcast of buffers outside the own time, in place of DDP's method of this name."""
        sync_buffers, points = type(ddp)._sync_buffers, self._points  # noqa: SLF001
        if torch.compiler.is_compiling() or not points or len(points) > MAX_POINTS:
            sync_buffers(ddp)  # type: ignore[no-untyped-call]
            return
        points.append((self._mark(), self._count_collectives()))
        sync_buffers(ddp)  # type: ignore[no-untyped-call]
        points.append((self._mark(), self._count_collectives()))

    def _end(self, parameter: Tensor) -> None:
        """End the own time at the first gradient; from then on, only its parameter gets a hook.

        A hook takes 20 us whenever it is called, so it is there in measured steps only.
        """
        if not self._points:
            return
        self._points.append((self._mark(), self._count_collectives()))
        self._points, self._first_parameter = [], parameter
        self._remove_hooks()

    def _add_hook(self, parameter: Tensor) -> None:
        self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._end)

    def _remove_hooks(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _update(self) -> None:
        """Read all samples but the last, which a GPU may not have reached, and record the median."""
        *samples, last = self._unread_samples
        self._unread_samples = [last]
        self._times_us.extend(map(self._read, samples))
        if len(self._times_us) == WINDOW_SAMPLES:
            times = sorted(time_us for time_us in self._times_us if time_us is not None)
            self._record(int(times[len(times) // 2]) if len(times) >= MIN_MEASURED_SAMPLES else 0)

    def _read(self, points: list[Point]) -> float | None:
        """Return the own time of a step; None without an end, or if it may have waited for other ranks."""
        if len(points) % 2 or len(points) > MAX_POINTS:
            return None
        total_us = 0.0
        for (start, collectives), (end, collectives_then) in zip(points[::2], points[1::2], strict=True):
            part_us = self._measure_us(start, end)
            if part_us is None or collectives != collectives_then:
                return None
            total_us += part_us
        return total_us
