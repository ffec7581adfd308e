"""Measure the own time of each step: how long this rank works until the ranks wait for each other.

The own time is from the end of `run.step` to the first gradient of the next backward pass. DDP sends no
gradient before that one. It includes what the script does between two steps, the wait for data and the
forward pass. It leaves out DDP's broadcast of buffers before the forward pass, which waits for other ranks.

A step with another collective within this time is not measured, nor is one without that gradient. On a GPU
two events are recorded per step and read a step later, so nothing waits for the GPU.
"""

from __future__ import annotations

import contextlib
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

WINDOW_STEPS = 100
MIN_MEASURED_STEPS = WINDOW_STEPS // 2
STEPS_PER_UPDATE = 10
MAX_MARKS = 64  # an evaluation may broadcast buffers often


class CpuClock:
    """The time of the host, in nanoseconds."""

    def mark(self) -> int:
        """Return the time now."""
        return time.perf_counter_ns()

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


class OwnTime:
    """The own times of this rank's newest steps, in one generation."""

    def __init__(self, record: Callable[[int], None], count_collectives: Callable[[], int]) -> None:
        """``record`` takes the median of the newest steps in microseconds; 0: too few were measured."""
        self._record = record
        self._count_collectives = count_collectives
        self._clock: CpuClock | CudaClock | None = None
        self._devices: set[torch.device] = set()
        self._hooks: dict[int, RemovableHandle] = {}
        # Start, then a pause's start and end for each broadcast, then the end: an odd number until the end.
        self._marks: list[Any] = []
        self._last_marks: list[Any] = []
        self._collectives = 0
        self._steps = 0
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
        """Begin the own time of the next step, and read that of the last one."""
        if self._clock is None:
            return
        finished, self._last_marks = self._last_marks, self._marks
        self._marks = [self._clock.mark()]
        self._collectives = self._count_collectives()
        self._times_us.append(self._read(finished))
        self._steps += 1
        if self._steps % STEPS_PER_UPDATE == 0 and len(self._times_us) == WINDOW_STEPS:
            times = sorted(time_us for time_us in self._times_us if time_us is not None)
            self._record(int(times[len(times) // 2]) if len(times) >= MIN_MEASURED_STEPS else 0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the block, in which ranks wait for each other."""
        was_running = self._is_running
        if was_running:
            self._add_mark()
        yield
        if was_running and self._clock is not None and self._marks:
            self._marks.append(self._clock.mark())
            self._collectives = self._count_collectives()

    def close(self) -> None:
        """Measure no more."""
        self._clock, self._marks = None, []
        for hook in self._hooks.values():
            hook.remove()

    @property
    def _is_running(self) -> bool:
        return len(self._marks) % 2 == 1

    def _end(self, parameter: Tensor) -> None:
        """End the own time at the first gradient; from then on, only its parameter keeps the hook."""
        if not self._is_running:
            return
        self._add_mark()
        if len(self._hooks) > 1:
            kept = self._hooks.pop(id(parameter))
            for hook in self._hooks.values():
                hook.remove()
            self._hooks = {id(parameter): kept}

    def _add_mark(self) -> None:
        if self._clock is None or len(self._marks) >= MAX_MARKS:
            self._marks = []
        elif self._count_collectives() == self._collectives:
            self._marks.append(self._clock.mark())
        else:  # this rank may have waited for another one
            self._marks = []

    def _read(self, marks: list[Any]) -> float | None:
        if self._clock is None or not marks or len(marks) % 2:
            return None
        parts = [
            self._clock.measure_us(start, end) for start, end in zip(marks[::2], marks[1::2], strict=True)
        ]
        return None if None in parts else sum(part for part in parts if part is not None)


_own_times: weakref.WeakKeyDictionary[nn.Module, OwnTime] = weakref.WeakKeyDictionary()


def _sync_buffers(ddp: DistributedDataParallel) -> None:
    """Run DDP's broadcast of buffers outside the own time.

    It replaces the method of this name in one wrapper. So copies of the wrapper get one of their own, and
    pickle stores the name alone.
    """
    own_time = _own_times.get(ddp)
    with own_time.paused() if own_time is not None else contextlib.nullcontext():
        DistributedDataParallel._sync_buffers(ddp)  # noqa: SLF001


def find_gpu(tracked: Mapping[str, Any]) -> str | None:
    """Return the UUID of the tracked model's GPU, as nvidia-smi prints it; None without one."""
    for item in tracked.values():
        parameter = next(item.parameters(), None) if isinstance(item, nn.Module) else None
        if parameter is not None and parameter.device.type == "cuda":
            with contextlib.suppress(AttributeError):  # builds for other vendors have no uuid
                return f"GPU-{torch.cuda.get_device_properties(parameter.device).uuid}"
    return None
