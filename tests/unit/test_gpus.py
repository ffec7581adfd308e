"""What is read from NVML, played by tests/support/fake_nvml, and what happens when the driver is broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastic_resume import gpus
from elastic_resume.gpus import Gpu, describe_load, list_gpus, watch_xids
from tests.support.gpus import FakeGpus

H100 = "NVIDIA H100 80GB HBM3"
ALL = (0, 1, 2, 3)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """Four healthy GPUs of this process."""
    found = FakeGpus(tmp_path, count=4)
    found.install(monkeypatch)
    return found


def list_indices(**environ: str) -> tuple[int, ...] | None:
    """Return the indices of the GPUs that workers with these variables see."""
    found = list_gpus(environ)
    return None if found is None else tuple(gpu.index for gpu in found)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, ALL),
        ("", ()),
        ("NoDevFiles", ()),  # Slurm, for a step without GPUs
        ("2,0", (2, 0)),
        (" 3 , 1", (3, 1)),
        ("1,-1,2", (1,)),
        ("0,7,1", (0,)),
        ("GPU-0002,GPU-0001", (2, 1)),
        ("GPU-000", ()),  # which of them?
        ("MIG-7,MIG-8", (3,)),  # no GPU has the second
    ],
)
def test_gpus_are_those_that_cuda_shows(
    fake: FakeGpus, visible: str | None, indices: tuple[int, ...]
) -> None:
    """In the order of CUDA's ordinals; CUDA ignores what follows a wrong entry."""
    fake.change_gpu(3, instances=["MIG-7"])
    assert list_indices(**({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})) == indices


def test_unequal_gpus_are_listed_only_if_their_order_is_known(fake: FakeGpus) -> None:
    """CUDA puts the fastest first, unless it is told otherwise."""
    fake.change_gpu(0, name="NVIDIA T400")
    assert list_indices() is None
    assert list_indices(CUDA_DEVICE_ORDER="PCI_BUS_ID") == ALL
    assert list_indices(CUDA_VISIBLE_DEVICES="GPU-0001") == (1,)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, ""),
        (1, "GPU reset"),
        (2, "reboot"),
        (3, "drain P2P"),
        (4, "drain and reset"),
        (99, "recovery action 99"),
        (None, ""),
    ],
)
def test_recovery_action_is_named(fake: FakeGpus, number: int | None, words: str) -> None:
    """A driver before r570 has none."""
    fake.change_gpu(1, recovery_action=number)
    assert list_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == (Gpu(1, "GPU-0001", H100, words),)


def test_lost_gpu_keeps_its_place_and_name(fake: FakeGpus) -> None:
    """A process that has never seen it cannot name it."""
    fake.change_gpu(0, lost=True)
    fake.change_gpu(2, errors={"nvmlDeviceGetHandleByIndex": 4})  # no permission: another job's
    assert list_gpus({}) == (Gpu(0, "", "", "reboot"), Gpu(1, "GPU-0001", H100), Gpu(3, "GPU-0003", H100))
    fake.change_gpu(1, lost=True)
    fake.change_gpu(3, errors={"nvmlDeviceGetFieldValues": 16})
    lost, reset = list_gpus({"CUDA_VISIBLE_DEVICES": "1,2"}) or ()
    assert (lost, reset) == (Gpu(1, "GPU-0001", H100, "reboot"), Gpu(3, "GPU-0003", H100, "GPU reset"))


def test_missing_or_broken_nvml_answers_nothing(fake: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error of NVML comes out."""
    fake.change(missing=["nvmlDeviceGetFieldValues"])
    assert list_indices() == ALL
    fake.change(errors={"nvmlInit": 18})  # the library does not fit the driver
    assert list_gpus({}) is None
    assert describe_load("GPU-0000") == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert list_gpus({}) is None
    assert list(watch_xids([Gpu(0, "GPU-0000", H100)], 0.0)) == []


def test_hanging_call_is_abandoned(fake: FakeGpus, caplog: pytest.LogCaptureFixture) -> None:
    """Further calls do not wait, until it returns."""
    fake.change(hanging=["nvmlDeviceGetFieldValues"])
    assert list_gpus({}, limit_s=0.05) is None
    assert describe_load("GPU-0000", limit_s=1e6) == ""
    assert "has not answered for 0.05 s" in caplog.text
    fake.change(hanging=[])
    for thread in gpus._abandoned:
        thread.join()
    assert list_indices() == ALL


def test_load_is_described(fake: FakeGpus) -> None:
    """Only what slows the GPU down is named; a driver may lack a function."""
    assert describe_load("GPU-0001") == "1,980 of 1,980 MHz, 45 °C"
    fake.change_gpu(1, clocks=[0, 1410, 0], temperatures=[87], clock_reasons=0x49)
    assert describe_load("GPU-0001") == "1,410 of 1,980 MHz, 87 °C, thermal slowdown"
    fake.change(missing=["nvmlDeviceGetTemperature"])
    assert describe_load("GPU-0001") == "1,410 of 1,980 MHz, thermal slowdown"
    assert describe_load("GPU-unknown") == ""


def test_xids_since_the_registration_are_reported(fake: FakeGpus) -> None:
    """Those of other GPUs are not; a lost GPU has no UUID. The iterator ends with NVML."""
    fake.report_xid(1, 94)
    watched = watch_xids(list_gpus({"CUDA_VISIBLE_DEVICES": "1,3"}) or (), 0.0)
    assert next(watched) is None
    fake.report_xid(0, 48)
    fake.report_xid(3, 48)
    fake.report_xid(1, 79, lost=True)
    assert [next(watched), next(watched), next(watched)] == [("GPU-0003", 48), ("", 79), None]
    fake.change(errors={"nvmlEventSetWait_v2": 15})
    assert list(watched) == []
