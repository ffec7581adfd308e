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


def test_who_waits_for_a_verdict_is_told_that_there_is_none_now() -> None:
    """Nothing is sent before a verdict, so what one node alone holds would be lost with it."""
    plan = ResumePlan("resumed", generation=2, source_node="n0", unproved="n0 alone holds this step")
    result = cast("Any", SimpleNamespace(plan=plan, nodes=("n0", "n1"), duration_s=0.0))
    line = announce.format_start(result, Position(0, 18, 18, 144), world_size=2)
    assert "no step lost; n0 alone holds this step, so a later resume will be proved (--prove); 2" in line
