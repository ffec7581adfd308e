"""Test the comparison of live state with a snapshot: what counts as a difference, and on which rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.policy.proof import UNMEASURED, RankComparison
from elastic_resume.proof.comparison import MAX_DIFFERENCES, Snapshots, compare_rank
from elastic_resume.state import state_dict
from tests.support.state_image import Box, copy_to_image

POSITION = Position(epoch=1, step_in_epoch=2, step=12, samples=48)


class Job:
    """A small training job with state of each kind."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.model = nn.Sequential(self.layer, self.norm)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.box = Box(1)
        self.average = torch.zeros(3)
        self.tracked: dict[str, Any] = state_dict.collect_objects(
            {"model": self.model, "optimizer": self.optimizer, "box": self.box, "ema": self.average}
        )

    def step(self) -> None:
        """Take an optimizer step."""
        loss: Tensor = self.model(torch.randn(4, 3)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def save(self, base: Snapshots | None = None) -> Snapshots:
        """Take a snapshot."""
        flat = state_dict.flatten(self.tracked)
        rank0 = tuple(leaf.name for leaf in flat.leaves if leaf.kind != state_dict.REPLICATED)
        manifest = Manifest("job", "n0", 0, 1, 1, POSITION, 1.0, "test", flat.structure, rank0_tensors=rank0)
        return Snapshots(manifest, copy_to_image(flat), base.target if base else None)


@pytest.fixture
def job() -> Job:
    """Return a job after two steps."""
    made = Job()
    made.step()
    made.step()
    return made


def compare(job: Job, snapshots: Snapshots, position: Position = POSITION, **options: bool) -> RankComparison:
    """Compare as the source rank, by default."""
    values = {"is_source": True, "knows_data": True, **options}
    return compare_rank(
        job.tracked,
        position,
        snapshots,
        is_source=values["is_source"],
        local_rank=0,
        knows_data=values["knows_data"],
        is_resized=options.get("is_resized", False),
    )


def test_equal_state_has_no_difference(job: Job) -> None:
    """Tensors and other values are counted."""
    found = compare(job, job.save())
    assert (found.count, found.beyond_rounding) == (0, False)
    assert found.tensors > 15
    assert found.values > 15


@torch.no_grad()
def change_weight(job: Job) -> None:
    """Change one element by little."""
    job.layer.weight[0, 0] += 1e-6


def change_rate(job: Job) -> None:
    """Change a hyperparameter."""
    job.optimizer.param_groups[0]["lr"] = 0.2


def change_buffer(job: Job) -> None:
    """Change a buffer, which may differ between ranks."""
    job.norm.running_mean.add_(1)  # type: ignore[union-attr]


def change_object(job: Job) -> None:
    """Change an object of the script's own."""
    job.box.value = 2


def add_value(job: Job) -> None:
    """Add a tensor."""
    job.box.value = torch.ones(2)


def change_dtype(job: Job) -> None:
    """Change the type of an average."""
    job.tracked["ema"]._container = job.average.double()


@pytest.mark.parametrize(
    ("change", "name", "text", "seen"),
    [
        (change_weight, "model/0.weight", "1 of 9 elements", "rounding, by all"),
        (change_rate, "optimizer/param_groups/0/lr", "was 0.1, now 0.2", "by all"),
        (change_buffer, "model/1.running_mean", "3 of 3 elements", "rounding"),
        (change_object, "box/value", "was 1, now 2", ""),
        (add_value, "box/value", "absent", ""),
        (change_dtype, "ema/value", "was float32[3], now float64[3]", ""),
    ],
)
def test_each_change_is_named(
    job: Job, change: Callable[[Job], None], name: str, text: str, seen: str
) -> None:
    """The source rank sees all. Others see what every rank holds alike."""
    kept = job.save()
    change(job)
    found = compare(job, kept)
    assert found.beyond_rounding is ("rounding" not in seen)
    assert text in {each.name: each.text for each in found.differences}[name]
    assert bool(compare(job, kept, is_source=False).count) is ("by all" in seen)


def test_hyperparameters_stand_first_and_few_differences_are_sent(job: Job) -> None:
    """All are counted."""
    kept = job.save()
    job.step()
    job.box.value = 3
    change_rate(job)
    found = compare(job, kept)
    assert found.differences[0].name.startswith("optimizer/")
    assert len(found.differences) == MAX_DIFFERENCES < found.count


@pytest.mark.parametrize(("knows_data", "count"), [(True, 1), (False, 0)])
def test_position_within_the_epoch_counts_if_data_is_known(job: Job, knows_data: bool, count: int) -> None:
    """Without it a loop over steps begins to count at 0 again, and is right."""
    position = Position(epoch=1, step_in_epoch=0, step=12, samples=48)
    assert compare(job, job.save(), position, knows_data=knows_data).count == count


def test_difference_is_measured_beside_what_the_steps_changed(job: Job) -> None:
    """The change is that of the tensor from the earlier snapshot to the newest."""
    base = job.save()
    job.step()
    kept = job.save(base)
    change_weight(job)
    assert 0 < compare(job, kept).rounding < 1e-4
    assert compare(job, Snapshots(kept.manifest, kept.target, None)).rounding == UNMEASURED


@pytest.mark.parametrize("name", ["step", "average"])
def test_single_float_is_no_rounding(job: Job, name: str) -> None:
    """It is a count, or a hyperparameter in a tensor."""
    job.tracked["ema"]._container = torch.ones(())
    kept = job.save()
    if name == "step":
        next(iter(job.optimizer.state.values()))["step"] += 1e-3
    else:
        job.tracked["ema"]._container = torch.full((), 1.0001)
    assert compare(job, kept).beyond_rounding


def test_another_number_of_ranks_compares_hyperparameters_alone(job: Job) -> None:
    """Weights are measured, and what the script tracks itself is left out."""
    kept = job.save()
    job.step()
    job.box.value = 3
    found = compare(job, kept, is_resized=True)
    assert (found.count, found.beyond_rounding, found.is_batch_changed) == (0, False, False)
    assert found.rounding > 0
    change_rate(job)
    assert compare(job, kept, is_resized=True).beyond_rounding
    fewer = Position(epoch=1, step_in_epoch=2, step=12, samples=40)
    assert compare(job, kept, fewer, is_resized=True).is_batch_changed
