"""Test which memory the copy barrier regards as an optimizer's."""

from __future__ import annotations

import torch
from torch import nn

from elastic_resume.capture.copy_barrier import CopyBarrier


def test_addresses_of_skipped_optimizer_include_lists_in_its_state() -> None:
    """LBFGS keeps its history in lists of tensors."""
    hooked = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    model = nn.Linear(3, 1)
    skipped = torch.optim.LBFGS(model.parameters(), lr=0.1)
    inputs = torch.randn(8, 3)

    def closure() -> torch.Tensor:
        skipped.zero_grad()
        loss: torch.Tensor = (model(inputs) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        skipped.step(closure)
    barrier: CopyBarrier[None] = CopyBarrier([hooked, skipped], lambda: None)
    hooked.step()
    barrier.end_step(1)
    state = skipped.state[model.weight]
    history = [*state["old_dirs"], *state["old_stps"]]
    assert history
    addresses = {tensor.data_ptr() for tensor in (*model.parameters(), state["prev_flat_grad"], *history)}
    assert barrier.skipped_optimizers == [skipped]
    assert addresses <= set(barrier.unprotected_addresses or ())
    barrier.close()
