"""Check ranks for equality in many states of a training, for test_replica_check.py.

Each rank prints one JSON object with the error of each state that raised one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import elastic_resume as er
from elastic_resume.errors import ElasticResumeError


class Average:
    """A hand-made average of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]
        self.extra: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        return {"shadow": self.shadow, "extra": self.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the average."""
        self.shadow = state["shadow"]


@contextlib.contextmanager
def flipped_bit(tensor: Tensor, *, here: bool) -> Iterator[None]:
    """Flip one bit of ``tensor`` for the duration of the context, if ``here``."""
    words = tensor.detach().view(torch.int32)
    if here:
        words.view(-1)[0] ^= 1
    yield
    if here:
        words.view(-1)[0] ^= 1


def main() -> None:
    """Train a few steps; check before, between and after."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    average = Average(model)
    run = er.resume(model=model, optimizer=optimizer, ema=average)
    errors: dict[str, str] = {}

    def record(state: str, check: Callable[[], None] = run.assert_ranks_equal) -> None:
        try:
            check()
        except ElasticResumeError as error:
            errors[state] = f"{type(error).__name__}: {error}"

    record("at first")
    ddp = run.ddp(model)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.randn(4, 3) + run.rank).square().mean().backward()
        optimizer.step()
        run.step()
    record("trained")
    with flipped_bit(model.get_buffer("1.running_mean"), here=run.rank == 1):
        record("buffer")
    with flipped_bit(model.get_parameter("2.weight"), here=run.rank == 1):
        record("weight")
    with flipped_bit(optimizer.state[model.get_parameter("0.bias")]["exp_avg"], here=run.rank == 0):
        record("optimizer")
    with flipped_bit(average.shadow[1], here=run.rank == 2):
        record("ema")
    optimizer.param_groups[0]["lr"] = 0.1 + run.rank
    record("learning rate")
    optimizer.param_groups[0]["lr"] = 0.1
    average.extra = print if run.rank == 1 else None
    record("not to be stored")
    average.extra = None
    if run.rank == 1:
        optimizer.state.clear()
    record("fewer tensors")
    model.register_buffer("seen", torch.zeros(1 + run.rank // 2))
    record("shape", run.step)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
