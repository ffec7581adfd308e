"""What is at an address: which entries a job has left, and what a missing place is told to be."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_resume import cli
from elastic_resume.archive.address import Address
from elastic_resume.archive.archive import Archive, open_archive
from elastic_resume.archive.location import find_archive
from elastic_resume.errors import NoValidCheckpointError
from elastic_resume.milestone import Milestone, WayBack
from tests.support.archives import PART_BYTES, archive_step, make_whole_manifest, put_parts
from tests.support.checkpoint_samples import RUN, make_image


@pytest.fixture
def address(tmp_path: Path) -> Address:
    """A job that was at step 400, went back to the best at step 100, and is at step 200 now."""
    archive = open_archive(str(tmp_path), RUN)
    archive_step(archive, 100, milestones=[Milestone("best", 2.0)])
    archive_step(archive, 400, milestones=[Milestone("best", 1.0), Milestone("late")])
    _archive_after(archive, WayBack("best", 1, 100, 2), 200)
    return Address("file", "", str(tmp_path))


def _archive_after(archive: Archive, way: WayBack, step: int) -> None:
    attempt, image = archive.begin((2, step), secrets.token_hex(16)), make_image(step)
    assert attempt is not None
    put_parts(archive, attempt, image)
    manifest = replace(make_whole_manifest(image, 2, step), ways_back=(way,))
    archive.commit(attempt, manifest.to_bytes(), PART_BYTES, [])


def test_ls_marks_what_the_job_has_left(address: Address, capsys: pytest.CaptureFixture[str]) -> None:
    """No job resumes it by itself."""
    assert cli.main(["ls", str(address)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [(row[2], row[-1]) for row in rows] == [("200", "yes"), ("400", "g2"), ("100", "yes")]
    assert rows[1][-4:] == ["late", "left", "by", "g2"]


@pytest.mark.parametrize(
    ("request_text", "version"),
    [
        ("best", (1, 100)),
        ("latest", (1, 100)),
        ("200", (2, 200)),
        ("g1-s400", (1, 400)),  # a checkpoint's name means just it
        ("g000001-s0000000400", (1, 400)),
    ],
)
def test_name_in_an_address_is_as_in_resume_from(
    address: Address, request_text: str, version: tuple[int, int]
) -> None:
    """A milestone that was left does not count."""
    assert find_archive(address / RUN / request_text).version == version


def test_missing_checkpoint_is_told_what_there_is(address: Address) -> None:
    """It exists, and the job has left it."""
    there = r"no checkpoint '400' in this run\. There is: g2-s200, g1-s400 \(late, left by g2\), g1-s100 \("
    with pytest.raises(NoValidCheckpointError, match=there):
        find_archive(address / RUN / "400")


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("trian", "{typed}: no archived checkpoints here. {root} has: run-1."),
        ("archive/trian", "{typed}: no archived checkpoints here. {root} has: run-1."),
    ],
)
def test_wrong_place_is_told_what_is_above_it(
    address: Address, capsys: pytest.CaptureFixture[str], typed: str, text: str
) -> None:
    """Nothing is there, and no remedy of --archive, such as mkdir, is given."""
    full = f"{address}/{typed}"
    assert cli.main(["ls", full]) == 1
    assert capsys.readouterr().err == f"elastic-resume: error: {text.format(typed=full, root=address)}\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["ls", "--archive", "s3://b/llm"],
            "this command has no --archive: give the address alone, as s3://",
        ),
        (["status", "s3://b/llm"], "s3://b/llm: status asks the agents of a running job; report takes the"),
    ],
)
def test_address_at_the_wrong_place_is_told_the_right_one(
    capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    """Nothing is asked of a store, and no directory of that name is looked for."""
    assert cli.main(words) != 0
    assert text in capsys.readouterr().err
