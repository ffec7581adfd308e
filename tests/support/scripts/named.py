"""Scripts, each with one thing (KIND) that a resume cannot make right: it is named at their first start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Sampler, TensorDataset

import elastic_resume as er
from tests.support.scripts.job_log import kill_as_planned
from tests.support.state_image import Box

KIND = os.environ["KIND"]


class DistributedWeighted(Sampler[int]):
    """Draw samples by weight, and divide them among the ranks."""

    def __len__(self) -> int:
        """Return the number of samples of a rank."""
        return 48 // dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        """Draw this rank's samples."""
        order = torch.multinomial(torch.ones(48), 48, True, generator=torch.Generator().manual_seed(0))
        return iter(order.tolist()[dist.get_rank() :: dist.get_world_size()])


class Queue(nn.Module):
    """A linear layer that keeps its last inputs."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("queue", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        self.queue.copy_(inputs.mean(0))
        outputs: Tensor = self.linear(inputs)
        return outputs


def main() -> None:
    """Train with the mistake of KIND."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(48, 4), torch.randn(48, 2))
    model = DistributedDataParallel(Queue(), broadcast_buffers=KIND != "buffers of each rank")
    weight = nn.Parameter(torch.ones(2))
    parameters = list(model.parameters()) + [weight] * (KIND == "loss weights")
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    scheduler = StepLR(optimizer, 1)
    average = AveragedModel(model) if KIND == "average not given" else None
    is_weighted = KIND == "weighted sampler"
    sampler: Sampler[int] = DistributedWeighted() if is_weighted else er.ElasticSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    if KIND == "compression":
        model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
    own = Box(100 * dist.get_rank())  # a position in this rank's own files
    run = er.resume(
        model=model,
        optimizer=optimizer,
        scheduler=None if KIND == "scheduler not given" else scheduler,
        data=None if KIND == "sampler not given" else loader,
        track={"loader": own} if KIND == "own loader" else None,
    )
    steps = 0  # a script that reads run.position may compute its learning rate from it
    batches = DataLoader(dataset, batch_size=3) if KIND == "other loader" else loader
    for _ in run.epochs(2):
        with Join([model]) if KIND == "join" else contextlib.nullcontext():
            for index, (inputs, targets) in enumerate(batches):
                kill_as_planned(run, steps)
                if KIND == "rate by an index":
                    optimizer.param_groups[0]["lr"] = 0.1 / (index + 2)
                loss = ((model(inputs) - targets).square() * weight).mean()
                optimizer.zero_grad()
                loss.backward()
                if KIND == "step first":
                    run.step()
                optimizer.step()
                own.value += 1
                steps += 1
                if average is not None:
                    average.update_parameters(model)
                if KIND not in {"scheduler last", "rate by an index"}:
                    scheduler.step()
                if KIND != "step first":
                    run.step()
                if KIND == "scheduler last":
                    scheduler.step()


if __name__ == "__main__":
    main()
