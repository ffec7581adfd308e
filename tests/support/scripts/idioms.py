"""A script of many idioms of public scripts at once, each of which a resume restores bit for bit.

Gradual unfreezing with an added group, a wrapper that shares the groups of its optimizer, a queue that the
first batch makes, augmentation in loader workers, a loader of each rank's own, a warm-up by the loop's index,
an average of the weights, early stopping. KILLS: see job_log.py. FAIL_EXPORT=1: what follows the training
fails once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import elastic_resume as er
from tests.support.scripts.job_log import kill_as_planned, write_end

BASE_RATE, WARM_UP = 0.02, 8


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with random noise, drawn in the loader's workers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(64, 4, generator=generator)
        self.targets = torch.randn(64, 2, generator=generator)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a sample with new noise."""
        return self.inputs[index] + torch.randn(4) / 10, self.targets[index]


class Network(nn.Module):
    """A frozen body, a head, and a queue of past features whose shape the first batch decides."""

    queue: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.body.requires_grad_(False)
        self.register_buffer("queue", None)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs beside the mean of the past features."""
        features = torch.relu(self.body(inputs))
        past = features.detach().mean(0) if self.queue is None else self.queue
        if self.training:
            self.queue = 0.9 * past + 0.1 * features.detach().mean(0)
        outputs: Tensor = self.head(features - past)
        return outputs


class Sharpness(torch.optim.Optimizer):
    """Wrap an optimizer and share its groups, as SAM, LARC and Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        """Scale the gradients by a factor of the group, and let the inner optimizer step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(group.get("trust", 1.0))
        return self.inner.step(closure)


class OwnLoader:
    """Values of this rank's own files, with a position in them."""

    def __init__(self, rank: int) -> None:
        self._values = torch.randn(500, generator=torch.Generator().manual_seed(rank))
        self._position = 7 * rank

    def draw(self) -> float:
        """Return the next value."""
        self._position += 1 + self._position % 3
        return float(self._values[self._position])

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position."""
        self._position = state["position"]


def main() -> None:
    """Train."""
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = Network()
    inner = torch.optim.AdamW(network.head.parameters(), lr=BASE_RATE)
    optimizer = Sharpness(inner)
    average = AveragedModel(network.head, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    own = OwnLoader(dist.get_rank())
    dataset = Augmented()
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, seed=3), num_workers=1)
    tracked = {"average": average, "inner": inner, "own": er.per_rank(own)}
    epochs = er.epochs(9, loader, model=network, optimizer=optimizer, track=tracked)
    run = epochs.run
    model = run.ddp(network)
    for epoch in epochs:
        if epoch == 1:
            network.body.requires_grad_(True)
            if len(optimizer.param_groups) == 1:
                body = list(network.body.parameters())
                optimizer.add_param_group({"params": body, "lr": BASE_RATE, "trust": 0.5})
                inner.param_groups[1].update(inner.defaults | inner.param_groups[1])
            model = DistributedDataParallel(network)  # DDP must see the new gradients
        for index, (inputs, targets) in epochs.enumerate(loader):
            kill_as_planned(run, run.position.step)
            for group in optimizer.param_groups:
                group["lr"] = BASE_RATE * min(1.0, (epoch * len(loader) + index + 1) / WARM_UP)
            loss = mse_loss(model(inputs), targets) * (1 + own.draw() / 100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(network.head)
        if epoch == 3:
            run.stop()  # early stopping
            break
    if os.environ.get("FAIL_EXPORT") and run.generation < 3:
        raise SystemExit("the export failed")
    assert run.position.step == 32
    write_end(directory, run, network=network, optimizer=optimizer, inner=inner, average=average, own=own)


if __name__ == "__main__":
    main()
