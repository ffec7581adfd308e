"""What nodes compare of the training script."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.agent.options import MAX_ARGUMENT_CHARS, describe_script_arguments, identify_script


@pytest.mark.parametrize(
    ("arguments", "node_arguments", "text"),
    [
        (["--lr", "0.1", "a b"], [], "--lr 0.1 'a b'"),
        (["--rank", "3", "--lr", "0.1"], ["--rank"], "--lr 0.1"),
        (["--rank=3", "--lr", "0.1"], ["--rank"], "--lr 0.1"),
        (["--fast", "--lr", "0.1"], ["--fast"], "--lr 0.1"),
        (["--rank", "--lr", "0.1"], ["--rank"], "--lr 0.1"),
        (["--rankings", "3"], ["--rank"], "--rankings 3"),
        (["--token", "abc"], [], "--token '***'"),
    ],
)
def test_arguments_leave_out_secrets_and_what_differs_on_purpose(
    arguments: list[str], node_arguments: list[str], text: str
) -> None:
    """The names are given with their dashes; a following word is the value unless it is an option."""
    assert describe_script_arguments(arguments, node_arguments) == text


def test_long_arguments_still_differ_if_their_ends_do() -> None:
    """The text is cut, and a digest of all of it follows."""
    first, second = (describe_script_arguments(["x" * 5000 + end], []) for end in "ab")
    assert first != second
    assert len(first) < MAX_ARGUMENT_CHARS + 20


def test_script_is_its_name_and_content(tmp_path: Path) -> None:
    """The directory may differ between nodes; a module has a name only."""
    paths = [tmp_path / name / "train.py" for name in "abc"]
    for path, text in zip(paths, ("1", "1", "2"), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    same, equal, other = map(identify_script, map(str, paths))
    assert same == equal != other
    assert same.startswith("train.py (")
    assert identify_script("package.train") == "package.train"
