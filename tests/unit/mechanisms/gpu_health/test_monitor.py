"""Which faults of GPUs the monitor reports and remembers, with the fake NVML."""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_resume import gpus
from elastic_resume.mechanisms.gpu_health.monitor import GpuMonitor
from elastic_resume.policy.gpu_faults import GpuFault
from tests.support.agent_parts import make_agent_context
from tests.support.gpus import FakeGpus

REBOOT = 2  # of NVML's enum
Found = queue.Queue[dict[str, Any]]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """Four healthy GPUs of this process."""
    found = FakeGpus(tmp_path, count=4)
    found.install(monkeypatch)
    monkeypatch.setattr("elastic_resume.mechanisms.gpu_health.monitor.EVENT_WAIT_S", 0.0)
    return found


@contextlib.contextmanager
def watch(workers: int) -> Iterator[tuple[GpuMonitor, Found]]:
    """Run a monitor; yield it and its events, until its thread has ended."""
    found: Found = queue.Queue()
    monitor = GpuMonitor(
        make_agent_context(workers=workers, emit=lambda kind, **fields: found.put({"event": kind, **fields}))
    )
    monitor.start(Mock(node="n0"))
    try:
        yield monitor, found
    finally:
        monitor._thread.close()


def fault(rank: int | None, index: int | None, xid: int | None, action: str = "") -> GpuFault:
    """Return the fault of that GPU."""
    return GpuFault(rank, index, "" if index is None else f"GPU-{index:04}", xid, action)


def list_faults(monitor: GpuMonitor) -> list[object]:
    """Return the faults for which the node starts no workers."""
    return [failure.cause for failure in monitor.find_faults()]


def event(*fields: Any) -> dict[str, Any]:
    """Return the gpu-fault event of that fault."""
    return {"event": "gpu-fault", **asdict(fault(*fields))}


def test_xids_of_own_gpus_are_faults(
    fake: FakeGpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those that a program causes, nor those of other agents' GPUs; a repeated one counts once."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    with watch(workers=2) as (monitor, found):
        fake.wait_watched(index=1)
        for index, xid in ((1, 31), (0, 79), (2, 79), (1, gpus.ACTION_CHANGED_XID), (3, 48), (3, 48)):
            fake.report_xid(index, xid)
        assert found.get(timeout=30) == event(0, 3, 48)
        fake.report_xid(1, gpus.ACTION_CHANGED_XID, recovery_action=REBOOT)
        assert found.get(timeout=30) == event(1, 1, 154, "reboot")
        expected = [fault(0, 3, 48), fault(1, 1, None, "reboot")]
        assert list_faults(monitor) == expected
        fake.change_gpu(0, recovery_action=REBOOT)  # no worker's
        assert list_faults(monitor) == expected
        assert found.empty()
    assert (
        "a GPU is broken (local rank 1; index 1; GPU-0001; Xid 154; the driver asks for: reboot); "
        in caplog.text
    )


def test_recovery_action_is_a_fault_while_the_driver_asks_for_it(fake: FakeGpus) -> None:
    """It has no Xid if the GPU failed before the start."""
    fake.change_gpu(0, recovery_action=4)
    with watch(workers=1) as (monitor, found):
        assert list_faults(monitor) == [fault(0, 0, None, "drain and reset")]
        assert found.get(timeout=30)["recovery_action"] == "drain and reset"
        fake.change_gpu(0, recovery_action=0)
        assert list_faults(monitor) == []


def test_lost_gpu_is_found_when_nvml_fails(fake: FakeGpus) -> None:
    """The wait for Xids ends with an error, and perhaps no Xid came."""
    with watch(workers=2) as (_, found):
        fake.wait_watched(index=1)
        fake.change_gpu(1, lost=True)
        fake.change(errors={"nvmlEventSetWait_v2": 15})
        assert found.get(timeout=30) == event(1, 1, None, "reboot")


def test_xid_of_lost_gpu_is_attributed(fake: FakeGpus) -> None:
    """NVML cannot name the GPU of the event. If no GPU looks lost, it is unknown which one it was."""
    with watch(workers=2) as (_, found):
        fake.wait_watched(index=1)
        fake.report_xid(1, 79, lost=True)
        assert found.get(timeout=30) == event(1, 1, 79, "reboot")
        fake.change_gpu(1, lost=False, errors={"nvmlDeviceGetUUID": 999})
        fake.report_xid(1, 79)
        assert found.get(timeout=30) == event(None, None, 79)


def test_workers_without_a_gpu_are_named(fake: FakeGpus, caplog: pytest.LogCaptureFixture) -> None:
    """Workers may share GPUs, so no rank is known, and nothing is a fault."""
    with watch(workers=6) as (monitor, found):
        assert list_faults(monitor) == []
        assert "this node has 6 workers and 4 GPUs" in caplog.text
        fake.wait_watched(index=3)
        fake.report_xid(3, 48)
        assert found.get(timeout=30) == event(None, 3, 48)


def test_machine_without_nvml_has_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends at once."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with watch(workers=1) as (monitor, found):
        assert list_faults(monitor) == []
        monitor._thread._thread.join()
        assert monitor._is_listed.is_set()  # else each start of workers would wait
        assert found.empty()
