"""Test which of the logged values the report's page draws."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from elastic_resume.mechanisms.curves import charts, journal
from elastic_resume.mechanisms.curves.charts import load_charts
from elastic_resume.mechanisms.curves.journal import Moment
from elastic_resume.mechanisms.mechanism import Chart


def write(
    node_dir: Path, generation: int, begin: int, source: int, steps: Iterable[int], *, factor: float = 1.0
) -> None:
    """Write the file of a generation on a node."""
    path = journal.record_path(node_dir, generation)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [journal.format_line([step, 0, 1.0, {"loss": factor * step}]) for step in steps]
    path.write_bytes(journal.format_begin(Moment(begin, 0), source, goes_back=False) + b"".join(lines))


def test_each_step_is_drawn_once_with_the_value_that_counts(tmp_path: Path) -> None:
    """Generation 2 has resumed step 3, and computed 4 and 5 again; a node has a part of its file only."""
    write(tmp_path / "n0", 1, 0, 0, range(1, 6))
    write(tmp_path / "n0", 2, 3, 1, range(4, 6), factor=2.0)
    write(tmp_path / "n1", 2, 3, 1, range(4, 8), factor=2.0)
    (chart,) = load_charts([tmp_path / "n0", tmp_path / "n1", tmp_path / "absent"])
    assert chart == Chart(
        "loss", ((1, 1.0), (2, 2.0), (3, 3.0), (4, 8.0), (5, 10.0), (6, 12.0), (7, 14.0)), (3,)
    )


def test_what_cannot_be_read_draws_nothing(tmp_path: Path) -> None:
    """A report is of use without curves."""
    assert load_charts([tmp_path]) == []
    write(tmp_path / "n0", 1, 0, 0, range(3))
    path = journal.record_path(tmp_path / "n0", 1)
    path.write_bytes(b"damaged\n")
    assert load_charts([tmp_path / "n0"]) == []
    with open(path, "wb") as file:
        file.truncate(charts.MAX_FILE_BYTES + 1)
    assert load_charts([tmp_path / "n0"]) == []
