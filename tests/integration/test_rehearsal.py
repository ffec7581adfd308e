"""Rehearsals: what is run, and what they find in a right and in a wrong script."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume import cli
from elastic_resume.errors import ConfigError
from elastic_resume.slots.progress_page import ProgressRecord, WorkerProcess
from elastic_resume.testing import rehearsal
from elastic_resume.testing.rehearsal import CheckResult, format_results, parse_command
from tests.support.paths import SCRIPTS


@pytest.mark.parametrize(
    ("words", "flags", "workers", "every"),
    [
        ("train.py --epochs 3", (), 1, "5"),
        ("--nproc-per-node 8 train.py", (), 4, "5"),
        ("--nproc-per-node gpu --snapshot-every 20 train.py", (), 1, "20"),
        ("--nnodes=2:4 --rdzv-endpoint n0,n1 --rdzv_id x --keep 5 train.py", ("--keep", "5"), 1, "5"),
        ("--no-python --keep=4 --time-limit 30s python -u x.py", ("--no-python", "--keep=4"), 1, "5"),
    ],
)  # fmt: skip
def test_flags_of_the_real_job_are_taken_without_its_place(
    words: str, flags: tuple[str, ...], workers: int, every: str
) -> None:
    """So a user puts one word in place of another."""
    found = parse_command(words.split())
    assert (found.flags, found.workers_per_node, found.snapshot_every) == (flags, workers, every)
    assert found.script[0] in {"train.py", "python"}


def test_wrong_commands_are_refused(tmp_path: Path) -> None:
    """Before anything is started."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        parse_command(["--dir", str(tmp_path), "train.py"])
    with pytest.raises(ConfigError, match="takes a number of steps"):
        parse_command(["--snapshot-every", "30s", "train.py"])


def test_table_says_what_was_not_made() -> None:
    """A check that could not be made is no success."""
    results = [CheckResult("within an epoch", "proved", "good", 5), CheckResult("later", "", "it has ended")]
    text = format_results(results, 3.0, "output of n0")
    assert "within an epoch  proved    5" in text
    assert "later            not made  -" in text
    assert "1 of 2 checks passed, in 3 s" in text
    assert "output of n0" in text


@pytest.mark.cluster
@pytest.mark.parametrize(("kind", "code"), [pytest.param("right", 0, marks=pytest.mark.soak), ("index", 1)])
def test_rehearsal_finds_what_a_script_does_not_restore(
    kind: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within an epoch, after one, and with half of the ranks."""
    log = tmp_path / "train.log"
    for name, value in {"KIND": kind, "EPOCHS": "8", "PAUSE": "0.03", "LOG": str(log)}.items():
        monkeypatch.setenv(name, value)
    command = [
        "rehearse",
        "--dir",
        str(tmp_path / "kept"),
        "--snapshot-every",
        "2",
        str(SCRIPTS / "proved.py"),
    ]
    assert cli.main([*command, str(tmp_path)]) == code
    text = capsys.readouterr().out
    assert f"The resumed script emptied {log}, which had" in " ".join(text.split())
    if kind == "right":
        assert "3 of 3 checks passed, 1 warning above, in" in text
        assert "with 1 of 2 ranks          resumed" in text
    else:
        assert "within an epoch            not proved" in text
        assert "optimizer/param_groups/0/lr: was 0.0" in " ".join(text.split())
    assert list((tmp_path / "kept" / "logs").glob("n*.log"))


def test_checks_cover_an_epoch_its_end_and_fewer_ranks() -> None:
    """In this order: the last one ends a node for good."""
    names = [check.name for check in rehearsal.list_checks(5, workers_per_node=2)]
    assert names == ["within an epoch", "after the end of an epoch", "with 2 of 4 ranks"]


def test_interruption_after_an_epoch_waits_for_a_snapshot_of_its_generation() -> None:
    """Else each further kill comes before there is another snapshot, and nothing is proved."""
    _, check, _ = rehearsal.list_checks(5, workers_per_node=1)

    def is_due(first_step: int, step: int) -> bool:
        worker = WorkerProcess(0, 0, 1, 77, 0, 0, 0)
        return check.is_due(ProgressRecord(0, 1, step, 2, False, worker, first_step, 0, 0, epoch_end_step=30))

    assert [is_due(0, step) for step in (29, 35, 36)] == [False, False, True]
    assert [is_due(35, step) for step in (36, 40, 41)] == [False, False, True]
