"""The line of a start says what is true."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from elastic_resume import constants
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.policy.resume_plan import ARCHIVE, Inventory, ResumePlan, SavedState, choose_resume_plan
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


def test_start_names_the_node_that_has_saved_the_state() -> None:
    """Another one may read its directory."""
    state = SavedState("n1", 2, 18, 0)
    plan = ResumePlan("resumed", generation=3, step=18, source_node="new", holders=(("new", state),))
    result = cast("Any", SimpleNamespace(plan=plan, nodes=("new",), duration_s=0.0))
    line = announce.format_start(result, Position(0, 18, 18, 144), world_size=1)
    assert "from n1's checkpoint of generation" in line


@pytest.mark.parametrize(
    ("generation", "step", "lost"),
    [
        (0, 0, "the nodes that trained are gone: steps after 450, if there were any, are lost"),  # new nodes
        (
            1,
            479,
            "the nodes that trained are gone: steps after 450, if there were any, are lost",
        ),  # absent since then
        (2, 479, "29 steps to recompute"),
        (2, 450, "no step lost"),
    ],
)
def test_start_from_the_archive_says_what_is_known_of_lost_steps(
    generation: int, step: int, lost: str
) -> None:
    """Nodes that are gone may have trained further than what they had archived."""
    state = SavedState("n1", 2, 450, 0, ARCHIVE)
    plan = choose_resume_plan(
        [Inventory("x", 0, (state,), last_generation=generation, last_step=step)], "auto"
    )
    result = cast("Any", SimpleNamespace(plan=plan, nodes=("x",), duration_s=0.0))
    line = announce.format_start(result, Position(0, 450, 450, 3600), world_size=1)
    assert f"archived checkpoint of generation 2; {lost}; 1 rank" in line


def make_notice(tier: str = "disk", *, goes_back: bool = False) -> announce.EarlierRunNotice:
    """Return the notice of a start whose earlier command is not known."""
    state = SavedState("n1", 2, 450, 0, tier)
    plan = ResumePlan(
        "resumed", generation=3, step=450, source_node="x", holders=(("x", state),), goes_back=goes_back
    )
    result = cast("Any", SimpleNamespace(plan=plan, earlier_command=()))
    settings = SimpleNamespace(archive="s3://bucket/llm", run_id="job")
    ranks = SimpleNamespace(rank=0, size=1)
    context = SimpleNamespace(
        settings=settings, run_dir=Path("/c/job"), collectives=ranks, is_local_leader=True
    )
    return announce.EarlierRunNotice(result, cast("Any", context), Position(0, 450, 450, 0), ["train.py"])


@pytest.mark.parametrize(("tier", "place"), [(ARCHIVE, "s3://bucket/llm/job"), ("disk", "/c/job")])
def test_notice_of_an_earlier_run_names_where_its_state_is(tier: str, place: str, caplog: Any) -> None:
    """The directory of a new node is empty. What is not known of that run is left out."""
    with caplog.at_level("INFO", "elastic_resume"):
        make_notice(tier).log_once()
    assert f"RESUMING AN EARLIER RUN from {place} at step 450. To start from scratch: " in caplog.text


def test_way_back_needs_no_notice_of_an_earlier_run(caplog: Any) -> None:
    """It was requested; that nothing is left to train is news all the same."""
    with caplog.at_level("INFO", "elastic_resume"):
        make_notice(goes_back=True).log_once()
        assert not caplog.messages
        make_notice(goes_back=True).log_once("all 5 epochs are done")
    assert "at step 450. NOTHING IS LEFT TO TRAIN: all 5 epochs are done. " in caplog.text


@pytest.mark.parametrize(
    ("code", "count"),
    [("for i, x in enumerate(loader): pass", 1), ("for x in loader: pass", 0), (None, 1)],
)
def test_hint_about_the_index_needs_a_script_that_has_one(
    code: str | None, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    """A notebook has no file to look at."""
    script = ModuleType("__main__")
    if code is not None:
        (tmp_path / "train.py").write_text(code)
        script.__file__ = str(tmp_path / "train.py")
    monkeypatch.setattr(announce, "is_own_module", lambda name: name == "__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    context = cast("Any", SimpleNamespace(node_dir=tmp_path, collectives=SimpleNamespace(rank=0)))
    with caplog.at_level("INFO", "elastic_resume"):
        for _ in range(2):
            announce.log_enumerate_hint(context, Position(1, 3, 19, 152))
    assert sum("enumerate(loader) starts at 0 again" in text for text in caplog.messages) == count


@pytest.mark.parametrize("agent", [None, "17"])
def test_torchrun_that_another_flag_has_taken_is_named(
    agent: str | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """``--standalone`` beats the variable, and only PyTorch's restarts are left."""
    monkeypatch.setenv("PET_RDZV_BACKEND", "elastic_resume")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.delenv(constants.ENV_AGENT_PID, raising=False)
    if agent:
        monkeypatch.setenv(constants.ENV_AGENT_PID, agent)
    announce._warn_of_other_rendezvous()
    assert ("--standalone and --rdzv-backend beat the variable" in caplog.text) == (agent is None)
