"""What libraries put around an optimizer, a scheduler or a module is looked through."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic_resume.state.state_dict import collect_objects


@pytest.mark.filterwarnings("ignore")  # those of the libraries
def test_wrappers_of_libraries_are_removed() -> None:
    """The tracked object is the one that the script made."""
    from accelerate import Accelerator  # noqa: PLC0415  seconds, as the next four
    from accelerate.scheduler import AcceleratedScheduler  # noqa: PLC0415
    from lightning.fabric import Fabric  # noqa: PLC0415
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment  # noqa: PLC0415
    from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: PLC0415

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerated = Accelerator(cpu=True).prepare(optimizer)
    fabric_model, fabric_optimizer = Fabric(accelerator="cpu", plugins=LightningEnvironment()).setup(
        model, optimizer
    )
    tracked = collect_objects(
        {
            "model": fabric_model,
            "optimizer": accelerated,
            "fabric": fabric_optimizer,
            "lightning": LightningOptimizer(optimizer),
            "scheduler": AcceleratedScheduler(scheduler, accelerated),
        }
    )
    assert tracked["model"] is model
    assert {tracked[name] for name in ("optimizer", "fabric", "lightning")} == {optimizer}
    assert tracked["scheduler"] is scheduler
