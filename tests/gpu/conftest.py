"""Fixtures of tests that need a GPU, or take a fake one."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.real_gpu import RealGpu
from tests.support.fake_gpu import FakeGpu
from tests.unit.capture import test_snapshotter

begin = test_snapshotter.begin


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> RealGpu | FakeGpu:
    """GPU 0 of this machine, or a fake one."""
    return RealGpu() if torch.cuda.is_available() else FakeGpu(monkeypatch)
