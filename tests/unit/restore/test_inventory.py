"""What a node offers for a resume, and what it moves: a world of one, on directories of every kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from elastic_resume import constants, events
from elastic_resume.checkpoint import node_dir, reader
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.node_dir import JOB_START_FILE
from elastic_resume.checkpoint.reader import checkpoint_name
from elastic_resume.config import Settings
from elastic_resume.errors import (
    CheckpointError,
    CorruptError,
    NewerFormatError,
    NodeFileError,
    NoValidCheckpointError,
    TornError,
    UnreadableError,
)
from elastic_resume.events import EventLog
from elastic_resume.policy import resume_plan
from elastic_resume.policy.resume_plan import Inventory
from elastic_resume.restore import coordinator
from elastic_resume.restore.attempt import RestoreAttempt
from elastic_resume.restore.collectives import Collectives
from elastic_resume.restore.inventory import from_json, list_snapshots_and_checkpoints, to_json
from elastic_resume.restore.rank_context import RankContext
from elastic_resume.snapshot.progress_page import ProgressPage
from tests.support import launch_ranks
from tests.support.checkpoint_samples import RUN, flip_bits, save_checkpoint
from tests.support.paths import SCRIPTS

NEWER = '{"kind":"elastic_resume checkpoint","format":2}'


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The directory of node a, with checkpoints of steps 1 and 2."""
    path = tmp_path / RUN / "a"
    path.mkdir(parents=True)
    save_checkpoint(path, 1, 1)
    save_checkpoint(path, 1, 2)
    return path


def place_at(node: Path, mode: str = "auto") -> RankContext:
    """Rank 0 of a world of one, on that node."""
    settings = Settings.for_worker(
        {}, "train.py", ckpt_dir=node.parent.parent, run_id=RUN, node_name="a", resume=mode
    )
    return RankContext(Collectives(0, 1, None), settings, EventLog(node / constants.EVENTS_FILE, node="a"))


def stock_of(node: Path, mode: str = "auto", generation: int = 1) -> Inventory:
    """What that node tells the others."""
    return list_snapshots_and_checkpoints(
        place_at(node, mode), ProgressPage(node / constants.PROGRESS_FILE), generation
    )


def told(node: Path, kind: str) -> list[events.Event]:
    """The events of one kind."""
    return [event for event in events.read(node / constants.EVENTS_FILE) if event["event"] == kind]


def test_an_inventory_is_read_back_by_other_ranks(node: Path) -> None:
    """Copies, refused ones with their kind, and the notes."""
    (node / checkpoint_name(1, 2) / constants.MANIFEST_FILE).write_text(NEWER)
    node_dir.record_committed_generation(node, 1)
    stock = stock_of(node)
    assert (stock.committed_generation, [r.kind for r in stock.rejected]) == (1, ["newer"])
    assert from_json(to_json(stock)) == stock


def test_damage_goes_to_quarantine_and_is_told(node: Path) -> None:
    """A file is missing: nobody can ever load it."""
    (node / checkpoint_name(1, 2) / constants.STATE_FILE).unlink()
    stock = stock_of(node)
    assert [copy.step for copy in stock.saved_states] == [1]
    assert [(r.name, r.kind) for r in stock.rejected] == [(checkpoint_name(1, 2), "aside")]
    assert len(told(node, "quarantine")) == 1


def test_a_newer_format_stops_the_job_and_changes_nothing(node: Path) -> None:
    """It stays where it is, and the older copy is not taken in its place."""
    (node / checkpoint_name(1, 2) / constants.MANIFEST_FILE).write_text(NEWER)
    stock = stock_of(node)
    with pytest.raises(NoValidCheckpointError, match=r"format 2.*Upgrade"):
        resume_plan.choose_resume_plan([stock], "auto")
    assert (node / checkpoint_name(1, 2) / constants.MANIFEST_FILE).read_text() == NEWER
    assert not (node / constants.QUARANTINE_DIR).exists()
    assert resume_plan.choose_resume_plan([stock_of(node, "never")], "never").kind == "cold"


def test_another_runs_directory_is_told_and_left_alone(node: Path) -> None:
    """Somebody copied it here; the node's own older copy is used."""
    other = Path(f"{node}-other")
    other.mkdir()
    save_checkpoint(other, 1, 8).rename(node / checkpoint_name(1, 9))
    plan = resume_plan.choose_resume_plan([stock_of(node)], "auto")
    assert plan.step == 2
    assert [(r.name, r.kind) for r in plan.rejected] == [(checkpoint_name(1, 9), "foreign")]
    assert (node / checkpoint_name(1, 9)).is_dir()


def test_a_copy_that_cannot_be_read_now_stays_and_is_told(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device fails for a moment; the copy is there for the next resume."""
    real = os.open
    newest = node / checkpoint_name(1, 2)

    def fail(path: Path, flags: int, mode: int = 0o777) -> int:
        if newest in Path(path).parents:
            raise OSError(5, os.strerror(5), str(path))
        return real(path, flags, mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        plan = resume_plan.choose_resume_plan([stock_of(node)], "auto")
    assert (plan.step, [r.kind for r in plan.rejected]) == (1, ["unreadable"])
    assert resume_plan.choose_resume_plan([stock_of(node)], "auto").step == 2


def test_a_link_is_offered_and_a_dead_one_is_told(node: Path) -> None:
    """Neither is moved, and neither is passed over in silence."""
    kept = Path(f"{node}-kept")
    (node / checkpoint_name(1, 2)).rename(kept)
    link = node / checkpoint_name(1, 2)
    link.symlink_to(kept)
    assert resume_plan.choose_resume_plan([stock_of(node)], "auto").step == 2
    kept.rename(f"{node}-unmounted")
    plan = resume_plan.choose_resume_plan([stock_of(node)], "auto")
    assert (plan.step, [r.kind for r in plan.rejected]) == (1, ["unreadable"])
    assert link.is_symlink()


def test_a_damaged_copy_behind_a_link_is_not_moved(node: Path) -> None:
    """It is on another disk, and somebody put the link here."""
    link = node / checkpoint_name(1, 9)
    link.symlink_to(node / checkpoint_name(1, 2))
    assert [r.kind for r in stock_of(node).rejected] == ["foreign"], "it has another name than its manifest"
    link.unlink()
    aside = Path(f"{node}-kept")
    (node / checkpoint_name(1, 2)).rename(aside)
    (node / checkpoint_name(1, 2)).symlink_to(aside)
    (aside / constants.STATE_FILE).unlink()
    assert [r.kind for r in stock_of(node).rejected] == ["torn"]
    assert (node / checkpoint_name(1, 2)).is_symlink()


def test_a_damaged_note_of_the_start_stops_only_those_who_need_it(node: Path) -> None:
    """Auto and must do not ask which copies are older than this start."""
    (node / JOB_START_FILE).write_text("")
    for mode in ("auto", "must"):
        assert resume_plan.choose_resume_plan([stock_of(node, mode)], mode).step == 2
    with pytest.raises(NodeFileError, match=r"job-start\.json"):
        stock_of(node, "never")


@pytest.mark.parametrize("damage", [b"\xff" * 32768, (9).to_bytes(8, "little"), b"garbage"])
def test_a_damaged_board_is_told_once_and_costs_only_the_count_of_lost_steps(
    node: Path, damage: bytes
) -> None:
    """The generation follows from generation.json and the copies, never from the board."""
    (node / constants.PROGRESS_FILE).write_bytes(damage)
    for _ in range(2):
        plan = resume_plan.choose_resume_plan([stock_of(node)], "auto")
        assert (plan.generation, plan.step, plan.recomputed_steps) == (2, 2, 0)
    (event,) = told(node, "progress-page-ignored")
    assert "is damaged" in event["reason"]


def test_steps_that_were_finished_and_never_saved_are_counted_as_lost(node: Path) -> None:
    """The board is what tells a cold start that is none of the job's first ones."""
    ProgressPage(node / constants.PROGRESS_FILE).start_generation(0, generation=1, step=37, world_size=1)
    assert resume_plan.choose_resume_plan([stock_of(node)], "auto").recomputed_steps == 35


def test_a_node_whose_checkpoints_were_removed_says_so(node: Path) -> None:
    """All else is still there: not a new node."""
    node_dir.record_committed_generation(node, 1)
    for entry in Catalog(node, RUN).list_entries():
        entry.path.rename(f"{node}-{entry.step}")
    with pytest.raises(NoValidCheckpointError, match="had checkpoints of this job"):
        resume_plan.choose_resume_plan([stock_of(node)], "auto")


@pytest.mark.cluster
def test_a_job_meets_a_newer_format_with_one_line_and_leaves_all_as_it_was(tmp_path: Path) -> None:
    """Two real ranks; the one whose copies can be read does not go on without the other."""
    probe = SCRIPTS / "probe.py"
    env = [{"ELASTIC_RESUME_CKPT_DIR": str(tmp_path)}] * 2
    assert [done.returncode for done in launch_ranks.run_ranks(2, probe, "plain", "4", env=env)] == [0, 0]
    nodes = [tmp_path / "probe" / name for name in ("n0", "n1")]
    newest = Catalog(nodes[1], "probe").list_valid()[0].path
    (newest / constants.MANIFEST_FILE).write_text(NEWER)
    before = [sorted(path.name for path in node.rglob("*")) for node in nodes]
    for done in launch_ranks.run_ranks(2, probe, "plain", "6", env=env):
        assert done.returncode == 1
        said = [line for line in done.stderr.splitlines() if "elastic_resume" in line]
        assert len(said) <= 2
        assert "Upgrade elastic_resume on every node" in said[0]
        assert "Traceback" not in done.stderr
    assert [sorted(path.name for path in node.rglob("*")) for node in nodes] == before
    assert (newest / constants.MANIFEST_FILE).read_text() == NEWER


# ---- what proves bad only when it is read as a whole -----------------------------------------------------


@pytest.mark.parametrize(
    ("error", "moved"), [(CorruptError, True), (TornError, True), (UnreadableError, False), (OSError, False)]
)
def test_only_proven_damage_is_moved_when_a_copy_fails_to_load(
    node: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], moved: bool
) -> None:
    """Either way the plan is made again without it, and says why."""

    def fail(*_: object) -> NoReturn:
        raise error("as told")

    place, stock = place_at(node), [stock_of(node)]
    plan = resume_plan.choose_resume_plan(stock, "auto")
    monkeypatch.setattr(reader, "map_unverified", fail)
    failures = coordinator._execute_plan(place, RestoreAttempt(place, plan), {})
    again = resume_plan.choose_resume_plan(
        coordinator._exclude_failed_copies(place, plan, stock, failures), "auto"
    )
    assert (again.step, len(again.rejected)) == (1, 1)
    assert "as told" in again.rejected[0].reason
    assert (node / checkpoint_name(1, 2)).exists() is not moved


def test_a_flipped_bit_is_found_before_anything_is_loaded(node: Path) -> None:
    """The quick look does not see it."""
    flip_bits(node / checkpoint_name(1, 2) / constants.STATE_FILE, -1)
    place, stock = place_at(node), [stock_of(node)]
    plan = resume_plan.choose_resume_plan(stock, "auto")
    failures = coordinator._execute_plan(place, RestoreAttempt(place, plan), {})
    assert failures["a"][0] == CorruptError.kind
    coordinator._exclude_failed_copies(place, plan, stock, failures)
    assert not (node / checkpoint_name(1, 2)).exists()


def test_a_copy_that_turns_out_to_be_of_a_newer_format_stops_the_job(node: Path) -> None:
    """Found at the second look: still no older copy in its place."""
    stock = [stock_of(node)]
    plan = resume_plan.choose_resume_plan(stock, "auto")
    (node / checkpoint_name(1, 2) / constants.MANIFEST_FILE).write_text(NEWER)
    place = place_at(node)
    failures = coordinator._execute_plan(place, RestoreAttempt(place, plan), {})
    assert failures["a"][0] == NewerFormatError.kind
    with pytest.raises(NoValidCheckpointError, match="Upgrade"):
        resume_plan.choose_resume_plan(
            coordinator._exclude_failed_copies(place, plan, stock, failures), "auto"
        )
    assert (node / checkpoint_name(1, 2)).exists()


def test_every_kind_of_checkpoint_error_has_a_name_of_its_own() -> None:
    """Inventories carry the name, and what is moved or fatal hangs on it."""
    kinds = [error.kind for error in CheckpointError.__subclasses__()]
    assert len(kinds) == len(set(kinds)) == 5
