"""The line of a start says what is true."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_resume.checkpoint.manifest import Position
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.training import announce


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (None, "generation 2: no checkpoint found, starting fresh; 1 rank on 1 node"),
        (
            2,
            (
                "generation 2: no snapshot or checkpoint of the generation before, starting over; 1 rank on "
                "1 node (before: 2 ranks)"
            ),
        ),
    ],
)
def test_start_after_a_generation_without_a_snapshot_is_no_fresh_start(before: int | None, text: str) -> None:
    """The first generation may have printed a step that nobody had copied."""
    plan = ResumePlan("cold", source_node="a", source_rank=0, generation=2, previous_world_size=before)
    result = cast("Any", SimpleNamespace(plan=plan, nodes=("a",), duration_s=0.0))
    assert announce.format_start(result, Position(0, 0, 0, 0), world_size=1) == text
