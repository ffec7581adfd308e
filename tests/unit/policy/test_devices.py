"""Test which GPU a rank uses."""

from __future__ import annotations

import pytest

from elastic_resume.policy.devices import choose_gpu


@pytest.mark.parametrize(
    ("local_rank", "visible", "current", "model_gpus", "expected"),
    [
        (0, 0, 0, (), None),
        (3, 0, 0, (), None),
        (0, 8, 0, (), 0),
        (3, 8, 0, (), 3),
        (3, 1, 0, (), 0),  # a launcher shows each rank its own GPU, or four ranks share one
        (5, 4, 0, (), 1),
        (3, 8, 2, (), 2),  # the script has set it
        (3, 8, 0, (0,), 0),
        (3, 8, 2, (5,), 5),
        (3, 8, 0, (4, 5), 3),
        (3, 8, 4, (4, 5), 4),
    ],
)
def test_gpu_follows_from_model_then_script_then_local_rank(
    local_rank: int, visible: int, current: int, model_gpus: tuple[int, ...], expected: int | None
) -> None:
    """A model on one GPU decides; NCCL fails if it is bound to another."""
    assert choose_gpu(local_rank, visible, current=current, model_gpus=model_gpus) == expected
