"""Test that the catalog keeps, prunes and quarantines the right checkpoints."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from elastic_resume import constants, milestone
from elastic_resume.checkpoint.atomic_io import Disk, temporary_name
from elastic_resume.checkpoint.catalog import Catalog, read_milestones, read_quarantine_reason, scan_run
from elastic_resume.checkpoint.reader import checkpoint_name
from elastic_resume.errors import CorruptError, ForeignError, TornError, UnreadableError, UsageError
from elastic_resume.milestone import Milestone
from tests.support.checkpoint_samples import RUN, flip_bits, make_image, save_checkpoint


def names(paths: list[Path]) -> list[str]:
    """Return the last parts of the paths."""
    return [path.name for path in paths]


def test_entries_sort_by_generation_and_step(tmp_path: Path) -> None:
    """The order depends neither on the step alone nor on file times."""
    orders = [(2, 5), (10, 1), (2, 40), (1, 999)]
    for order in orders:
        save_checkpoint(tmp_path, *order)
    os.utime(tmp_path / checkpoint_name(1, 999))
    entries = Catalog(tmp_path, RUN).list_entries()
    assert [entry.version for entry in entries] == sorted(orders, reverse=True)
    assert all(entry.manifest and entry.manifest.version == entry.version for entry in entries)


def test_bad_entry_has_its_error(tmp_path: Path) -> None:
    """A quick check finds torn checkpoints; reading all data also finds corrupt ones."""
    for step in range(1, 5):
        save_checkpoint(tmp_path, 1, step)
    (tmp_path / checkpoint_name(1, 4) / constants.STATE_FILE).unlink()
    flip_bits(tmp_path / checkpoint_name(1, 3) / constants.STATE_FILE, -1)
    catalog = Catalog(tmp_path, RUN)
    assert [type(entry.error) for entry in catalog.list_entries()] == [TornError, *[type(None)] * 3]
    deep_entries = catalog.list_entries(read_data=True)
    assert [type(entry.error) for entry in deep_entries] == [TornError, CorruptError, *[type(None)] * 2]
    assert [entry.step for entry in catalog.list_entries(limit=2)] == [4, 3]
    others = Catalog(tmp_path, "other").list_entries()
    assert {type(entry.error) for entry in others} == {ForeignError}


def test_prune_keeps_newest_valid_checkpoints(tmp_path: Path) -> None:
    """Invalid ones do not count towards ``keep``, and are not removed."""
    for step in range(1, 7):
        save_checkpoint(tmp_path, 1, step)
    (tmp_path / checkpoint_name(1, 6) / constants.MANIFEST_FILE).unlink()
    (tmp_path / checkpoint_name(1, 2) / constants.STATE_FILE).write_bytes(b"")
    catalog = Catalog(tmp_path, RUN)
    assert names(catalog.prune(2)) == [checkpoint_name(1, 3), checkpoint_name(1, 1)]
    assert names([entry.path for entry in catalog.list_entries()]) == [
        checkpoint_name(1, s) for s in (6, 5, 4, 2)
    ]
    assert catalog.prune(2) == []
    with pytest.raises(ValueError, match="at least 2"):
        catalog.prune(1)


def test_prune_keeps_milestones_and_does_not_count_them(tmp_path: Path) -> None:
    """Of those with a metric the best. Names that cannot be read keep their checkpoint."""
    catalog = Catalog(tmp_path, RUN)
    paths = {step: save_checkpoint(tmp_path, 1, step) for step in range(1, 9)}
    for step, name, metric in ((1, "eval", None), (2, "best", 0.5), (3, "best", 0.25), (7, "eval", None)):
        catalog.add_milestone(paths[step], Milestone(name, metric))
    catalog.add_milestone(paths[1], Milestone("eval", None))
    catalog.add_milestone(paths[2], Milestone("other", 1.0))
    (paths[4] / constants.MILESTONES_FILE).write_text("torn")
    assert names(catalog.prune(2)) == [checkpoint_name(1, step) for step in (5, 3)]
    kept = {entry.step: entry.milestones for entry in catalog.list_valid()}
    assert kept == {
        8: (),
        7: (Milestone("eval"),),
        6: (),
        4: (Milestone("?"),),
        2: (Milestone("best", 0.5), Milestone("other", 1.0)),
        1: (Milestone("eval"),),
    }
    assert read_milestones(catalog.quarantine(paths[1], "x")) == (Milestone("eval"),)


def test_name_beyond_the_limit_is_refused_and_all_others_stay(tmp_path: Path) -> None:
    """Its file has a limit, beyond which no name could be read. A known name may change its metric."""
    catalog, path = Catalog(tmp_path, RUN), save_checkpoint(tmp_path, 1, 1)
    for number in range(milestone.MAX_NAMES):
        catalog.add_milestone(path, Milestone(f"{number:064}-"[1:]))
    with pytest.raises(UsageError, match="it has 32 names"):
        catalog.add_milestone(path, Milestone("one-more"))
    catalog.add_milestone(path, Milestone(f"{7:064}-"[1:], 1.5))
    assert len(read_milestones(path)) == milestone.MAX_NAMES


def test_prune_ignores_unknown_files(tmp_path: Path) -> None:
    """A user's files, another run's checkpoint and odd names stay."""
    for step in range(1, 5):
        save_checkpoint(tmp_path, 1, step)
    (tmp_path / checkpoint_name(0, 2)).write_text("a file")
    assert len(Catalog(tmp_path, RUN).list_entries()) == 4
    (tmp_path / checkpoint_name(0, 3)).mkdir()
    for odd in ("best model ü\n", "$(rm -rf)", "g1-s2", "-rf", "events.jsonl", "*"):
        (tmp_path / odd).mkdir()
        (tmp_path / odd / "kept").write_text("x")
    before = {path.name for path in tmp_path.iterdir()}
    catalog = Catalog(tmp_path, RUN)
    removed = set(names(catalog.prune(2)))
    assert removed == {checkpoint_name(1, 1), checkpoint_name(1, 2)}
    assert {path.name for path in tmp_path.iterdir()} == before - removed
    assert Catalog(tmp_path, "other").prune(2) == []


def test_quarantine_never_overwrites(tmp_path: Path) -> None:
    """A checkpoint of one name may be quarantined repeatedly."""
    catalog = Catalog(tmp_path, RUN)
    moved = [catalog.quarantine(save_checkpoint(tmp_path, seed=seed), f"reason {seed}") for seed in range(3)]
    assert names(moved) == [checkpoint_name(1, 1), f"{checkpoint_name(1, 1)}.1", f"{checkpoint_name(1, 1)}.2"]
    assert catalog.list_quarantined() == sorted(moved)
    for seed, path in enumerate(moved):
        assert (path / constants.STATE_FILE).read_bytes() == make_image(seed)
        assert read_quarantine_reason(path) == f"reason {seed}"
    assert catalog.list_entries() == []


@pytest.mark.parametrize("left", ["directory", "reason"])
def test_quarantine_overwrites_no_half_of_an_earlier_one(tmp_path: Path, left: str) -> None:
    """A crash comes before the reason is written, and a user removes the directory only."""
    catalog = Catalog(tmp_path, RUN)
    first = catalog.quarantine(save_checkpoint(tmp_path, seed=1), "first")
    reason = first.with_name(f"{first.name}.reason.json")
    reason.unlink() if left == "directory" else first.rename(tmp_path / "elsewhere")
    second = catalog.quarantine(save_checkpoint(tmp_path, seed=2), "second")
    assert second.name == f"{first.name}.1"
    assert (second / constants.STATE_FILE).read_bytes() == make_image(2)
    assert read_quarantine_reason(second) == "second"
    assert read_quarantine_reason(first).startswith("first" if left == "reason" else "unknown")


def test_quarantine_ignores_unfinished_reasons(tmp_path: Path) -> None:
    """A crash leaves them."""
    (tmp_path / constants.QUARANTINE_DIR).mkdir()
    (tmp_path / constants.QUARANTINE_DIR / temporary_name("x.reason.json")).write_text("{")
    assert Catalog(tmp_path, RUN).list_quarantined() == []


class DiskThatListsCalls(Disk):
    """A real disk that lists what it does to directories."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def rename(self, source: Path, target: Path) -> None:
        """See base class."""
        super().rename(source, target)
        self.calls.append(("rename", source.parent.name))

    def sync_dir(self, path: Path) -> None:
        """See base class."""
        super().sync_dir(path)
        self.calls.append(("sync", path.name))

    def remove_tree(self, path: Path) -> None:
        """See base class."""
        self.calls.append(("remove", path.parent.name))
        super().remove_tree(path)


def test_names_are_synced_in_order(tmp_path: Path) -> None:
    """The new name is durable before the old one goes, and no name is durable when the first byte goes."""
    node, quarantine = tmp_path.name, constants.QUARANTINE_DIR
    catalog = Catalog(tmp_path, RUN, disk := DiskThatListsCalls())
    (tmp_path / quarantine).mkdir()
    moved = catalog.quarantine(save_checkpoint(tmp_path), "bad")
    assert disk.calls[-5:] == [
        ("rename", node),
        ("sync", quarantine),
        ("sync", node),
        ("rename", quarantine),  # the reason
        ("sync", quarantine),
    ]
    disk.calls.clear()
    catalog.delete_quarantined(moved)
    assert disk.calls[:4] == [("rename", quarantine), ("sync", quarantine), ("sync", node), ("remove", node)]
    assert list((tmp_path / quarantine).iterdir()) == []
    for step in (2, 3, 4):
        save_checkpoint(tmp_path, 1, step)
    disk.calls.clear()
    assert len(catalog.prune(2)) == 1
    assert disk.calls[:3] == [("rename", node), ("sync", node), ("remove", node)]


def test_remove_unfinished_removes_directories_of_dead_writers_only(tmp_path: Path) -> None:
    """A live writer keeps its directory; a reused pid does not protect one."""
    path = save_checkpoint(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        active = tmp_path / f".tmp-{checkpoint_name(1, 2)}-{living.pid}-0123abcd"
        active.mkdir()
        reused = tmp_path / f".tmp-{checkpoint_name(1, 3)}-{living.pid}-01234567"
        reused.mkdir()
        os.utime(reused, (1e9, 1e9))  # older than the process that has its number now
        dead = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
        )
        dead_path = tmp_path / f".tmp-{checkpoint_name(1, 4)}-{int(dead.stdout)}-89abcdef"
        (dead_path / "sub").mkdir(parents=True)
        (dead_path / constants.STATE_FILE).write_bytes(b"half")
        (tmp_path / ".tmp-odd").mkdir()
        own = tmp_path / temporary_name("mine")
        own.mkdir()
        removed = Catalog(tmp_path, RUN).remove_unfinished()
        living.communicate(b"\n")
    assert set(removed) == {reused, dead_path, tmp_path / ".tmp-odd"}
    assert set(tmp_path.iterdir()) == {path, active, own}


def test_remove_unfinished_ignores_file_renamed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent replaces its small files while a worker of its node starts."""
    gone = tmp_path / temporary_name("rendezvous.json")
    monkeypatch.setattr("elastic_resume.checkpoint.catalog._list_directory", lambda _: [gone])
    assert Catalog(tmp_path, RUN).remove_unfinished() == []


def test_catalog_of_missing_directory_is_empty(tmp_path: Path) -> None:
    """A missing directory is no error."""
    catalog = Catalog(tmp_path / "none", RUN)
    assert not catalog.list_entries()
    assert not catalog.list_quarantined()
    assert not catalog.remove_unfinished()
    assert scan_run(tmp_path / "none", RUN) == {}


def test_scan_run_lists_every_visible_node(tmp_path: Path) -> None:
    """Files and directories with odd names are not nodes."""
    for node in ("a", "b.example-1"):
        (tmp_path / node).mkdir()
        for step in range(1, 4):
            save_checkpoint(tmp_path / node, 1, step)
    (tmp_path / "empty").mkdir()
    (tmp_path / "token").write_text("x")
    (tmp_path / ".hidden").mkdir()
    found = scan_run(tmp_path, RUN, limit=2)
    assert {node: [e.step for e in entries] for node, entries in found.items()} == {
        "a": [3, 2],
        "b.example-1": [3, 2],
        "empty": [],
    }


def test_link_to_checkpoint_is_read_but_never_moved(tmp_path: Path) -> None:
    """A linked checkpoint can be resumed from; it is never pruned or called damaged, even if it dangles."""
    node, elsewhere = tmp_path / "node", tmp_path / "elsewhere"
    node.mkdir()
    elsewhere.mkdir()
    for step in (1, 2, 3):
        save_checkpoint(node, 1, step)
    save_checkpoint(elsewhere, 1, 9)
    link = node / checkpoint_name(1, 9)
    link.symlink_to(elsewhere / checkpoint_name(1, 9))
    catalog = Catalog(node, RUN)
    assert [(entry.step, entry.is_link) for entry in catalog.list_valid()][:2] == [(9, True), (3, False)]
    assert names(catalog.prune(2)) == [checkpoint_name(1, 1)]
    assert link.is_symlink()
    (elsewhere / checkpoint_name(1, 9) / constants.STATE_FILE).unlink()
    torn = catalog.list_entries()[0]
    assert isinstance(torn.error, TornError)
    assert not torn.is_damaged
    (elsewhere / checkpoint_name(1, 9)).rename(elsewhere / "unmounted")
    dangling = catalog.list_entries()[0]  # the job must not look as if it had never saved
    assert isinstance(dangling.error, UnreadableError)
    assert not dangling.is_damaged


def test_unreadable_and_foreign_checkpoints_are_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of another run or a newer format, or unreadable now, are not quarantined."""
    save_checkpoint(tmp_path, 1, 1)
    assert [entry.is_damaged for entry in Catalog(tmp_path, "other").list_entries()] == [False]
    newer = save_checkpoint(tmp_path, 1, 2) / constants.MANIFEST_FILE
    newer.write_text('{"kind":"elastic_resume checkpoint","format":99}')
    (save_checkpoint(tmp_path, 1, 3) / constants.STATE_FILE).unlink()
    (save_checkpoint(tmp_path, 1, 4) / constants.MANIFEST_FILE).write_text("rubbish")
    damaged = {entry.step: entry.is_damaged for entry in Catalog(tmp_path, RUN).list_entries()}
    assert damaged == {4: True, 3: True, 2: False, 1: False}

    def fail(path: object, *_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(os, "open", fail)
    assert not any(entry.is_damaged for entry in Catalog(tmp_path, RUN).list_entries())


def test_checkpoint_pruned_meanwhile_is_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 lists other nodes' directories while these may prune."""
    save_checkpoint(tmp_path, 1, 1)
    pruned = save_checkpoint(tmp_path, 1, 2)
    real = os.open

    def vanish(path: Path, flags: int, mode: int = 0o777) -> int:
        if pruned in Path(path).parents and pruned.exists():
            pruned.rename(tmp_path / ".tmp-pruned")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", vanish)
    assert [entry.step for entry in Catalog(tmp_path, RUN).list_entries()] == [1]


def test_prune_counts_only_trusted_checkpoints(tmp_path: Path) -> None:
    """A flipped bit passes the quick check."""
    for step in range(1, 7):
        save_checkpoint(tmp_path, 1, step)
    catalog = Catalog(tmp_path, RUN)
    assert catalog.prune(2, trusted_versions={(1, 2)}) == []
    assert names(catalog.prune(2, trusted_versions={(1, 6), (1, 3), (1, 2)})) == [
        checkpoint_name(1, 2),
        checkpoint_name(1, 1),
    ]
    assert [entry.step for entry in catalog.list_entries()] == [6, 5, 4, 3]
