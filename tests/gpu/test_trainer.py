"""Test the code for CUDA tensors in the integration of Hugging Face's Trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.real_gpu import RealGpu
from tests.support.fake_gpu import FakeGpu


@pytest.fixture(scope="module")
def trainer_class() -> Any:
    """The class. Its import takes seconds, which only the worker of xdist that runs this test spends."""
    from elastic_resume.integrations.transformers import ElasticTrainer  # noqa: PLC0415

    return ElasticTrainer


def test_trial_of_a_loss_leaves_generators_of_the_gpu(
    trainer_class: Any, gpu: RealGpu | FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer's loss is computed twice before training, with dropout perhaps."""
    devices: list[Any] = []
    fork_rng = torch.random.fork_rng

    def fork(wanted: list[int]) -> Any:
        devices.append(wanted)
        return fork_rng(wanted if isinstance(gpu, RealGpu) else [])

    monkeypatch.setattr(torch.random, "fork_rng", fork)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(device=gpu.device),
        accelerator=SimpleNamespace(gather=lambda found: found),
        _elastic_attributes=None,
    )

    def compute(_: nn.Module, inputs: Tensor, num_items_in_batch: float) -> Tensor:
        return inputs.sum() / num_items_in_batch

    found = trainer_class._elastic_try_loss(trainer, compute, nn.Linear(1, 1), gpu.put(torch.ones(3)), 4)
    assert found is True
    assert devices == [[0], [0]]
