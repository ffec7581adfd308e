"""Copy tensors into a slot in a background thread; on CUDA in a stream of its own.

One call of ``torch._foreach_copy_`` copies thousands of tensors and holds the GIL only briefly. A Python loop
would take the GIL for each tensor and wait up to 5 ms each time.

On CUDA only the thread waits for the device. The copy stream waits for the training stream's event, copies
into pinned memory and records an event. The training stream waits for that event before it changes
parameters.
"""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, eq
from typing import Any

import torch
from torch import Tensor

from elastic_resume.checkpoint.atomic_io import memory_address
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.slots.progress_page import STACKS_SIGNAL
from elastic_resume.slots.slot_memory import Slot
from elastic_resume.state.state_dict import DTYPE_BY_NAME

get_format = attrgetter("dtype", "shape")
TENSORS_PER_CALL = 4096  # such a call holds the GIL for half a millisecond


def make_tensor_views(memory: memoryview, layout: Layout) -> dict[str, Tensor]:
    """Return each non-empty tensor of an image in ``memory``, by name.

    There is one buffer for each dtype, split in C: views made one by one take three times as long.
    """
    views: dict[str, Tensor] = {}
    filled = ((name, extent) for name, extent in layout.extents.items() if extent.stop > extent.start)
    for dtype_name, run in groupby(filled, key=lambda item: item[1].dtype):
        entries = list(run)
        dtype = DTYPE_BY_NAME[dtype_name]
        counts = [(extent.stop - extent.start) // dtype.itemsize for _, extent in entries]
        flat = torch.frombuffer(memory, dtype=dtype, count=sum(counts), offset=entries[0][1].start)
        for (name, extent), piece in zip(entries, flat.split(counts), strict=True):
            views[name] = piece.view(extent.shape)
    return views


def copy_tensors(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    *,
    formats: Sequence[Any] = (),
    non_blocking: bool = False,
) -> None:
    """Copy each source into its target. ``formats`` are those of the targets, if known.

    Raises:
        ValueError: a source has another dtype or shape than its target. Earlier batches were copied.

    """
    with torch.no_grad():
        for at in range(0, len(targets), TENSORS_PER_CALL):
            into, batch = list(targets[at : at + TENSORS_PER_CALL]), list(sources[at : at + TENSORS_PER_CALL])
            # torch would convert another dtype and broadcast another shape without an error.
            expected = formats[at : at + len(batch)] or map(get_format, into)
            if not all(map(eq, map(get_format, batch), expected)):
                raise ValueError("a tensor changed its dtype or shape")
            torch._foreach_copy_(into, batch, non_blocking=non_blocking)


@dataclass
class CopyJob:
    """One rank's share of one snapshot, which runs in the copy thread."""

    work: Callable[[CopyJob], None]
    peer_timeout_s: float = 0.0  # how long to wait for other ranks' shares while training waits
    error: BaseException | None = None
    torn_names: list[str] = field(default_factory=list)  # tensors that changed while they were copied
    copy_s: float = 0.0  # what the copy alone took
    # CUDA events of the copies; the list is complete once sources_read is set.
    copy_events: list[Any] = field(default_factory=list)
    # Set when host tensors have been read and all device copies are in their streams.
    sources_read: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    wait_started_at: float = math.inf  # time.monotonic(); infinite until training waits

    def wait_until_read(self) -> None:
        """Wait for `sources_read`."""
        self.wait_started_at = min(self.wait_started_at, time.monotonic())
        self.sources_read.wait()

    def wait_until_done(self) -> None:
        """Wait for `done`."""
        self.wait_started_at = min(self.wait_started_at, time.monotonic())
        self.done.wait()


class CopyThread:
    """A thread that runs copy jobs one after the other."""

    def __init__(self) -> None:
        self._job_queue: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="elastic-resume-copy", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        """Queue ``job``."""
        self._job_queue.put(job)

    def close(self) -> None:
        """End the thread after the jobs that were submitted."""
        self._job_queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        # The main thread must receive the signal that requests its stacks.
        signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})
        while (job := self._job_queue.get()) is not None:
            run_job(job)


def run_job(job: CopyJob) -> None:
    """Run ``job`` in the calling thread, and store its error."""
    try:
        job.work(job)
    except BaseException as error:  # noqa: BLE001  raised or logged by the thread that waits
        job.error = error
    finally:
        job.sources_read.set()
        job.done.set()


# ---- CUDA ----------------------------------------------------------------------------------------------


class CudaCopyStreams:
    """Copies from CUDA devices. It does nothing while all tensors are on the CPU."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pinned_slots: dict[tuple[int, int], Slot | None] = {}  # keeps the registered memory mapped

    def record_start_events(self, devices: Iterable[torch.device]) -> dict[torch.device, Any]:
        """Record an event in the training stream of each device."""
        return {device: torch.cuda.current_stream(device).record_event() for device in devices}

    def enqueue_copies(
        self,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        start_events: dict[torch.device, Any],
        job: CopyJob,
    ) -> None:
        """Enqueue the copies of device tensors behind ``start_events``, and add their events to ``job``."""
        for device, event in start_events.items():
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
            pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if s.device == device]
            with torch.cuda.device(device), torch.cuda.stream(stream):
                stream.wait_event(event)
                copy_tensors([t for t, _ in pairs], [s for _, s in pairs], non_blocking=True)
                for _, source in pairs:
                    source.record_stream(stream)  # the allocator must not reuse it before it was read
                copied = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
                stream.record_event(copied)
                job.copy_events.append((device, copied))

    def pin_slot(self, slot: Slot) -> None:
        """Register a slot's memory with CUDA, once. Copies to other memory are staged, and block."""
        key = (slot.index, slot.serial)
        if key in self._pinned_slots or not torch.cuda.is_initialized():
            return
        with contextlib.suppress(RuntimeError, AttributeError):
            code = torch.cuda.cudart().cudaHostRegister(memory_address(slot.memory), slot.capacity, 0)
            self._pinned_slots[key] = slot if int(code) == 0 else None
            if int(code) != 0:
                warnings.warn(
                    f"snapshot slot {slot.index} cannot be pinned: CUDA error {int(code)}; copies are slow",
                    stacklevel=2,
                )

    def unpin_stale_slots(self, live_slots: Collection[tuple[int, int]] = ()) -> None:
        """Unregister all slots but ``live_slots``, given as (index, serial), so that their memory is freed.

        Call it while nothing is being copied.
        """
        for key in [key for key in self._pinned_slots if key not in live_slots]:
            slot = self._pinned_slots.pop(key)
            if slot is not None:
                with contextlib.suppress(RuntimeError, AttributeError):
                    torch.cuda.cudart().cudaHostUnregister(memory_address(slot.memory))


def wait_until_mutable(job: CopyJob) -> None:
    """Wait until the sources of ``job`` may be changed by the host and by work it enqueues from now on.

    The training stream of each device waits for the copies; the host does not wait for the device.
    """
    job.wait_until_read()
    for device, event in job.copy_events:
        torch.cuda.current_stream(device).wait_event(event)
