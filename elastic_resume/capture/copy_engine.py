"""Copies tensors into a slot: in a thread behind the training thread's back, on CUDA in a stream of its own.

One call of ``torch._foreach_copy_`` copies thousands of tensors without the GIL; a Python loop would take it
for each, and wait up to 5 ms for it each time. Measured, 80,000 tensors of 64 floats: 53 ms in one call, of
which 10 ms hold the GIL; so a call gets `BATCH` of them. 150 tensors of 4 MB: 38 ms, 16 GB/s, and no GIL.

On CUDA nothing waits for the device but the thread: its stream waits for the training stream's event, copies
into pinned memory, and records an event for which the training stream waits before it changes parameters.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from elastic_resume.checkpoint.layout import Layout
from elastic_resume.snapshot.progress_page import STACKS_SIGNAL
from elastic_resume.snapshot.slots import Slot
from elastic_resume.state.tensor_buffer import DTYPES

_dtype = attrgetter("dtype")
BATCH = 4096  # tensors of one call; it holds the GIL for half a millisecond


def views(memory: memoryview, layout: Layout) -> dict[str, Tensor]:
    """Give every tensor of an image in ``memory`` that has elements, by name.

    One buffer for each dtype, split in C: made one by one, 80,000 tensors take three times as long.
    """
    found: dict[str, Tensor] = {}
    filled = ((name, extent) for name, extent in layout.extents.items() if extent.stop > extent.start)
    for dtype_name, run in groupby(filled, key=lambda item: item[1].dtype):
        entries = list(run)
        dtype = DTYPES[dtype_name]
        counts = [(extent.stop - extent.start) // dtype.itemsize for _, extent in entries]
        flat = torch.frombuffer(memory, dtype=dtype, count=sum(counts), offset=entries[0][1].start)
        for (name, extent), piece in zip(entries, flat.split(counts), strict=True):
            found[name] = piece.view(extent.shape)
    return found


def copy_now(targets: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source into its target.

    Raises:
        ValueError: a source has another dtype or size than its target; those before it were copied.

    """
    with torch.no_grad():
        for at in range(0, len(targets), BATCH):
            into, batch = list(targets[at : at + BATCH]), list(sources[at : at + BATCH])
            # The copy itself would convert the one and stretch the other.
            for kind in (Tensor.numel, _dtype):
                if list(map(kind, batch)) != list(map(kind, into)):
                    raise ValueError("a tensor has become one of another dtype or size")
            torch._foreach_copy_(into, batch, non_blocking=non_blocking)


@dataclass
class Job:
    """One share of one snapshot. ``work`` runs in the thread; ``done`` is set when it is over.

    ``read`` is set when the host's tensors have been read and all that a device has to copy is in its
    stream: ``events`` are then complete. ``patience_s``: how long training waits for other ranks' part of it.
    """

    work: Callable[[Job], None]
    patience_s: float = 0.0
    error: BaseException | None = None
    events: list[Any] = field(default_factory=list)
    read: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    awaited: float = math.inf  # since when training waits for it

    def await_read(self) -> None:
        """Wait for `read`."""
        self.awaited = min(self.awaited, time.monotonic())
        self.read.wait()

    def await_done(self) -> None:
        """Wait for `done`."""
        self.awaited = min(self.awaited, time.monotonic())
        self.done.wait()


class Copyist:
    """The thread that copies, one job after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="elastic-resume-copy", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Have it done."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread when it has done what was submitted."""
        self._jobs.put(None)
        self._thread.join()

    def _live(self) -> None:
        # Who asks where this process stands means its main thread; a stopped one goes on when it is asked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})
        while (job := self._jobs.get()) is not None:
            run(job)


def run(job: Job) -> None:
    """Do a job here."""
    try:
        job.work(job)
    except BaseException as error:  # noqa: BLE001  told by whoever waits; a thread has nobody to raise to
        job.error = error
    finally:
        job.read.set()
        job.done.set()


# ---- CUDA ----------------------------------------------------------------------------------------------


class Streams:
    """Copies from devices; does nothing, and costs nothing, where all tensors are on the CPU."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pinned: dict[tuple[int, int], Slot | None] = {}  # held: CUDA's memory must stay mapped

    def begin(self, devices: Iterable[torch.device]) -> dict[torch.device, Any]:
        """Note, for each device, what its training stream has been given until now."""
        return {device: torch.cuda.current_stream(device).record_event() for device in devices}

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: dict[torch.device, Any], job: Job
    ) -> None:
        """Enqueue the copies of device tensors behind ``after``; their events go to ``job``."""
        for device, event in after.items():
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
            pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if s.device == device]
            with torch.cuda.device(device), torch.cuda.stream(stream):
                stream.wait_event(event)
                copy_now([t for t, _ in pairs], [s for _, s in pairs], non_blocking=True)
                for _, source in pairs:
                    source.record_stream(stream)  # the allocator keeps it until it has been read
                copied = torch.cuda.Event(blocking=True)  # who waits for it sleeps, and does not spin
                stream.record_event(copied)
                job.events.append((device, copied))

    def pin(self, slot: Slot) -> None:
        """Register a slot's memory with CUDA, once: copies to other memory are staged, and so wait."""
        key = (slot.index, slot.serial)
        if key in self._pinned or not torch.cuda.is_initialized():
            return
        with contextlib.suppress(RuntimeError, AttributeError):
            code = torch.cuda.cudart().cudaHostRegister(_address(slot), slot.capacity, 0)
            self._pinned[key] = slot if int(code) == 0 else None
            if int(code) != 0:
                warnings.warn(f"a slot cannot be pinned (CUDA error {int(code)})", stacklevel=2)

    def unpin(self, alive: Collection[tuple[int, int]] = ()) -> None:
        """Let CUDA forget slots that are not among those (index, serial): else their memory stays.

        Call it while nothing is being copied.
        """
        for key in [key for key in self._pinned if key not in alive]:
            slot = self._pinned.pop(key)
            if slot is not None:
                with contextlib.suppress(RuntimeError, AttributeError):
                    torch.cuda.cudart().cudaHostUnregister(_address(slot))


def _address(slot: Slot) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot.memory))


def fence(job: Job) -> None:
    """Return when what the job copies may be changed: by the host, and by what it enqueues from now on.

    The training stream of each device waits for the copies; the host does not wait for the device.
    """
    job.await_read()
    for device, event in job.events:
        torch.cuda.current_stream(device).wait_event(event)
