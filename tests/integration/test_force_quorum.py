"""`elastic-resume force-quorum`: its output, its request file, and how an agent reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume import cli
from elastic_resume.rendezvous.core.events import PersistentState
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.net.durable_state import FORCE_QUORUM_FILE, DurableStateFile

A, B, C = (Incarnation(name, "1", f"{name}:1", candidate_index=place) for place, name in enumerate("abc"))


def node_dir(run_dir: Path, incarnation: Incarnation = A, generation: int = 7) -> Path:
    """Make the directory of a node that was in a view of three, or in none."""
    path = run_dir / incarnation.node
    path.mkdir(parents=True)
    view = View(generation, (A, B, C), A) if generation else None
    DurableStateFile(path).write(PersistentState(incarnation, QuorumState(3, view), generation))
    return path


def test_force_quorum_with_yes_leaves_the_generation_for_the_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file names the newest generation; it is read back, and removed once."""
    path = node_dir(tmp_path)
    assert cli.main(["force-quorum", str(tmp_path), "--yes"]) == 0
    output = capsys.readouterr().out
    assert "Generation 7, as a knows it: a, b, c." in output
    assert "two worlds train at the same time" in output
    record = DurableStateFile(path)
    assert record.read_force_request() == 7
    record.remove_force_request()
    record.remove_force_request()
    assert record.read_force_request() is None


def test_force_quorum_without_yes_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what it would do."""
    path = node_dir(tmp_path)
    assert cli.main(["force-quorum", str(path)]) == 1
    assert "again with --yes" in capsys.readouterr().out
    assert not (path / FORCE_QUORUM_FILE).exists()


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([], "no node has taken part in a rendezvous here"),
        ([(A, 7), (B, 7)], "2 nodes are here (a, b): give the directory of one of them"),
        ([(A, 0)], "this node has been in no world yet"),
    ],
)
def test_force_quorum_refuses_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: list[tuple[Incarnation, int]], problem: str
) -> None:
    """It prints one line and writes no file."""
    for incarnation, generation in nodes:
        node_dir(tmp_path, incarnation, generation)
    assert cli.main(["force-quorum", str(tmp_path), "--yes"]) == 1
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.rglob(FORCE_QUORUM_FILE))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"generation": "7"}', b"\xff"])
def test_read_force_of_a_damaged_file_is_none(tmp_path: Path, data: bytes) -> None:
    """A damaged request declares no node dead."""
    path = node_dir(tmp_path)
    (path / FORCE_QUORUM_FILE).write_bytes(data)
    assert DurableStateFile(path).read_force_request() is None
