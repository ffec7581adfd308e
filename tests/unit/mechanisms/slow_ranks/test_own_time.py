"""Test what counts as a rank's own time, on the CPU with real DDP and on a GPU with a fake one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume.mechanisms.slow_ranks import own_time
from elastic_resume.mechanisms.slow_ranks.own_time import WINDOW_STEPS, CudaClock, OwnTime

pytestmark = pytest.mark.usefixtures("process_group")


@dataclass
class Job:
    """A training in which time passes only where a test says so."""

    monkeypatch: pytest.MonkeyPatch
    now_us: int = 0
    collectives: int = 0
    medians: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.monkeypatch.setattr(own_time.CpuClock, "mark", lambda _: self.now_us * 1000)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.ddp = DistributedDataParallel(model)
        self.own_time = OwnTime(self.medians.append, lambda: self.collectives)
        self.own_time.watch(self.ddp)
        original = DistributedDataParallel._sync_buffers

        def broadcast(ddp: DistributedDataParallel) -> None:
            original(ddp)  # type: ignore[no-untyped-call]
            self.collectives += 1
            self.now_us += 10_000  # another rank is waited for

        self.monkeypatch.setattr(DistributedDataParallel, "_sync_buffers", broadcast)

    def train(self, before_forward: Callable[[], None], steps: int = WINDOW_STEPS + 20) -> None:
        """Take steps of 7 us after `before_forward`; the last 1000 follow the first gradient."""
        first = self.ddp.module[2].bias
        for _ in range(steps):
            before_forward()
            loss = self.ddp(torch.ones(2, 2)).sum()
            self.now_us += 7
            hook = first.register_post_accumulate_grad_hook(lambda _: self.pass_time(1000))
            loss.backward()
            hook.remove()
            self.own_time.end_step(1)

    def pass_time(self, time_us: int) -> None:
        """Let time pass."""
        self.now_us += time_us


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Wrap a small model with buffers in DDP, and measure it."""
    return Job(monkeypatch)


def test_own_time_ends_at_first_gradient_and_leaves_out_broadcasts(job: Job) -> None:
    """It counts what the script does between steps. The median comes with the hundredth step."""
    job.train(lambda: job.pass_time(3))
    assert set(job.medians) == {10}
    assert sum(len(p._post_accumulate_grad_hooks or ()) for p in job.ddp.parameters()) == 1


def test_step_with_another_collective_is_not_measured(job: Job) -> None:
    """Others may have been waited for. With half of the steps measured there is a median."""

    def wait_for_others() -> None:
        job.collectives += 1
        job.pass_time(5000)

    turns = iter(range(10_000))
    job.train(lambda: wait_for_others() if next(turns) % 6 < 2 else job.pass_time(3))
    assert set(job.medians) == {10}
    job.train(wait_for_others)
    assert job.medians[-1] == 0


def test_forward_passes_of_an_evaluation_cost_one_sample(job: Job) -> None:
    """They broadcast buffers too, in training mode, and more of them than are kept."""

    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(own_time.MAX_POINTS):
                job.ddp(torch.ones(2, 2))

    job.train(evaluate, 3)
    job.train(lambda: None)
    assert set(job.medians) == {7}


def test_watched_model_is_copied_and_pickled_as_before(job: Job) -> None:
    """A copy broadcasts its own buffers, and measures nothing."""
    job.train(lambda: None, 3)
    for made in (copy.deepcopy(job.ddp), pickle.loads(pickle.dumps(job.ddp))):  # noqa: S301 - our own
        made.module[1].running_mean.fill_(5)
        before = job.collectives
        made(torch.ones(2, 2)).sum().backward()
        assert job.collectives == before + 1
    job.own_time.close()
    assert not any(p._post_accumulate_grad_hooks for p in job.ddp.parameters())


class FakeCuda:
    """A GPU that reaches events only when it is told to."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.events: list[Any] = []

    def is_current_stream_capturing(self) -> bool:
        """Return whether a graph is captured."""
        return self.is_capturing

    def current_stream(self, device: torch.device) -> str:
        """Return the stream of a device."""
        return f"stream of {device}"

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 - torch's name
        """Make an event that is not reached yet."""
        assert enable_timing
        event: Any = SimpleNamespace(time_ms=None, query=lambda: event.time_ms is not None)
        event.record = lambda stream: self.events.append((event, stream))
        event.elapsed_time = lambda end: end.time_ms - event.time_ms
        return event


def test_cuda_clock_reads_only_events_that_the_gpu_has_reached() -> None:
    """Nothing waits for the GPU, and no event becomes part of a captured graph."""
    cuda = FakeCuda()
    clock = CudaClock(torch.device("cuda", 1), cuda)
    start, end = clock.mark(), clock.mark()
    assert [stream for _, stream in cuda.events] == ["stream of cuda:1"] * 2
    start.time_ms = 2.0
    assert clock.measure_us(start, end) is None
    end.time_ms = 3.5
    assert clock.measure_us(start, end) == 1500
    cuda.is_capturing = True
    assert clock.mark() is None
    assert clock.measure_us(start, None) is None
