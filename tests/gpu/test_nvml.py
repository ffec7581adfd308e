"""What is read from the real NVML of this machine's GPUs."""

from __future__ import annotations

import queue
from unittest.mock import Mock

import pytest
import torch

from elastic_resume import gpus
from elastic_resume.mechanisms.gpu_health.monitor import GpuMonitor
from tests.support.agent_parts import make_agent_context

pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MAX_CHECK_S = 0.2  # a start of workers waits for it


def test_gpus_are_those_of_torch() -> None:
    """In the same order, by UUID; with a load."""
    found = gpus.list_gpus(limit_s=gpus.START_LIMIT_S)
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    assert [gpu.uuid for gpu in found or ()] == [f"GPU-{one.uuid}" for one in properties]
    assert " MHz" in gpus.describe_load(f"GPU-{properties[0].uuid}")


def test_healthy_gpus_have_no_faults() -> None:
    """The driver accepts the registration for Xids, and answers within the time that a start may wait."""
    assert gpus.list_gpus(limit_s=gpus.START_LIMIT_S)
    found: queue.Queue[str] = queue.Queue()
    workers = torch.cuda.device_count()
    monitor = GpuMonitor(make_agent_context(workers=workers, emit=lambda kind, **_: found.put(kind)))
    monitor.start(Mock(node="n0"))
    assert monitor.find_faults() == ()
    assert next(gpus.watch_xids(gpus.list_gpus(limit_s=MAX_CHECK_S) or (), 0.01), "ended") is None
    monitor.close()
    assert found.empty()
