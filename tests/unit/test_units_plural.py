"""Messages say "1 step is run again" and "2 steps are run again"."""

from __future__ import annotations

import pytest

from elastic_resume.checkpoint.manifest import Position
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.restore.coordinator import ResumeResult
from elastic_resume.state.state_dict import FlatState
from elastic_resume.testing import chaos
from elastic_resume.training import announce
from elastic_resume.units import choose_verb, format_count


@pytest.mark.parametrize(("count", "said"), [(0, "0 steps are"), (1, "1 step is"), (2, "2 steps are")])
def test_format_count_and_verb_follow_number(count: int, said: str) -> None:
    """Zero is plural."""
    assert f"{format_count(count, 'step')} {choose_verb(count, 'is', 'are')}" == said
    assert format_count(1, "batch", "batches") == "1 batch"
    assert format_count(count, "batch", "batches") == ("1 batch" if count == 1 else f"{count} batches")


@pytest.mark.parametrize(
    ("lost", "said"),
    [(0, "no step lost"), (1, "; 1 step to recompute;"), (2, "; 2 steps to recompute;")],
)
def test_resume_line_counts_recomputed_steps(lost: int, said: str) -> None:
    """Rank 0 prints the line."""
    plan = ResumePlan("checkpoint", 2, 5, "n0", recomputed_steps=lost)
    resumed = ResumeResult(plan, None, FlatState((), {}), ("n0",), 0.1)
    assert said in announce.format_resume_lines(resumed, Position(0, 5, 5, 5), 1)


@pytest.mark.parametrize(
    ("lost", "size", "said"),
    [
        (0, 1, "generation 2: 1 rank trains from step 6 on"),
        (1, 2, "generation 2: 2 ranks train from step 6 on; 1 step is run again"),
        (3, 2, "generation 2: 2 ranks train from step 6 on; 3 steps are run again"),
    ],
)
def test_chaos_line_counts_ranks_and_steps(lost: int, size: int, said: str) -> None:
    """Chaos prints it for each generation."""
    event = {"event": "resume", "generation": 2, "step": 5, "world_size": size, "recomputed_steps": lost}
    assert chaos._format_event(event) == said
