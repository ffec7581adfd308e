"""The loader that a script with Accelerate has made: what its loop gathers from unequal shares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.thread_ranks import ThreadCollectives, run_ranks

pytestmark = pytest.mark.slow  # importing accelerate takes seconds

WORLD = 3


def make_rank(collectives: ThreadCollectives, weight: float, *, in_evaluation: bool = False) -> Any:
    """Make the accelerator of one rank, whose loop has read a batch of this weight."""
    from accelerate.utils import recursively_apply  # noqa: PLC0415  seconds, as the next

    from elastic_resume.integrations.accelerate_loader import gather_uneven  # noqa: PLC0415

    def gather_one(tensor: Tensor) -> Tensor:
        parts = collectives.gather(tensor.reshape(tensor.shape or (1,)).tolist())
        assert len({len(part) for part in parts}) == 1, "gloo would end the job"
        return torch.tensor([row for part in parts for row in part])

    state = SimpleNamespace(in_dataloader=in_evaluation)
    accelerator: Any = SimpleNamespace(gradient_state=state)
    accelerator.gather = lambda data: recursively_apply(gather_one, data)
    batches: Any = SimpleNamespace(read_weight=weight)
    gather_uneven(accelerator, batches)
    return accelerator


@pytest.mark.parametrize(
    ("shares", "weights", "expected"),
    [
        ([[1, 2], [3, 4], [5, 6]], [1.0, 1.0, 1.0], [1, 2, 3, 4, 5, 6]),
        ([[1, 2], [3, 4], [5]], [1.2, 1.2, 0.6], [1, 2, 3, 4, 5]),
        ([[1], [2], [2]], [1.5, 1.5, 0.0], [1, 2]),  # the last rank reads a sample of another one
    ],
)
def test_loop_gathers_each_sample_of_unequal_shares_once(
    shares: list[list[int]], weights: list[float], expected: list[int]
) -> None:
    """Whatever a tensor holds of each sample; a number of each rank stays one of each rank."""

    def run(collectives: ThreadCollectives) -> Any:
        rank = collectives.rank
        samples = torch.tensor(shares[rank])
        accelerator = make_rank(collectives, weights[rank])
        return accelerator.gather({"x": samples, "pair": (torch.stack([samples] * 2, 1), torch.tensor(rank))})

    for found in run_ranks(WORLD, run):
        pairs, ranks = found["pair"]
        assert found["x"].tolist() == expected
        assert pairs.tolist() == [[one, one] for one in expected]
        assert ranks.tolist() == [0, 1, 2]


def test_loader_for_evaluation_is_gathered_as_by_accelerate() -> None:
    """Within the loop over the training loader: its batch's weight is not that of the evaluation's rows."""

    def run(collectives: ThreadCollectives) -> Any:
        accelerator = make_rank(collectives, 1.5 * (collectives.rank < WORLD - 1), in_evaluation=True)
        return accelerator.gather(torch.tensor([collectives.rank])).tolist()

    assert run_ranks(WORLD, run) == [[0, 1, 2]] * WORLD


def test_loop_notes_the_weight_of_the_batch_it_has_read() -> None:
    """Until it ends, also by a break: what is gathered then is no share."""
    from elastic_resume.integrations import accelerate_loader  # noqa: PLC0415  seconds

    batches = accelerate_loader.FirstWorldBatches(5, 2, 1, shuffle=False)
    batches.bind(0, 1)
    loader: Any = torch.utils.data.DataLoader(torch.arange(5), batch_sampler=batches)  # type: ignore[arg-type]
    weights = iter((1.0, 0.5, 0.25))
    run: Any = SimpleNamespace()
    accelerator: Any = SimpleNamespace(device_placement=False)
    accelerate_loader.read_for_run(accelerator, loader, run)
    seen = []
    reader: Any = iter(loader)
    for run.loss_weight in weights:
        next(reader)
        seen.append(batches.read_weight)
    reader.close()
    assert seen == [1.0, 0.5, 0.25]
    assert batches.read_weight == 1.0
