from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.mechanisms.curves.exporter import Exporter, Point, parse_exporter
from tests.support.killed_writers import assert_equal_points, write_with_kills


def _open(
    text: str, last_written: int = -1, *, run: str = "job-1", go_back_to: int | None = None
) -> Exporter:
    exporter = parse_exporter("--log-metrics", text)(run)
    exporter.open(last_written, go_back_to)
    return exporter


def _read_csv(path: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            assert step not in found
            assert float(row.pop("time")) > 0
            assert row.pop("run") == "job-1"
            found[step] = {key: float(text) for key, text in row.items() if text}
    return found


def _read_jsonl(path: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        assert step not in found
        assert row.pop("run") == "job-1"
        assert row.pop("time") > 0
        found[step] = {key: float(value) for key, value in row.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_kills_leave_each_step_once(kind: str, tmp_path: Path) -> None:
    """One line per step, whatever the killed writers had written and were known to have written."""
    path = tmp_path / "run" / f"loss.{kind}"
    write_with_kills(f"{kind}:{path}", tmp_path, 300)
    assert_equal_points((_read_csv if kind == "csv" else _read_jsonl)(path), 300)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_cut_line_at_any_byte_is_repaired(kind: str, tmp_path: Path) -> None:
    """A line that is cut anywhere is written again; the lines before it stay."""
    path = tmp_path / "loss"
    points = [Point(step, 1.5, {"a,b": step / 3}) for step in range(3)]
    first = _open(f"{kind}:{path}")
    first.write(points)
    first.close()
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        again = parse_exporter("--log-metrics", f"{kind}:{path}")("job-1")
        assert again.open(2) == 1
        again.write(points[2:])
        again.close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_zero_bytes_of_a_power_cut_are_removed(kind: str, tmp_path: Path) -> None:
    """A file system may have given a file its size before its data."""
    path = tmp_path / "loss"
    exporter = _open(f"{kind}:{path}")
    exporter.write([Point(1, 1.0, {"a": 1.0})])
    exporter.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 200_000 + b"5\n")
    _open(f"{kind}:{path}").close()
    assert path.read_bytes() == whole


def test_last_line_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    """A row may have thousands of columns."""
    path = tmp_path / "loss.csv"
    exporter = _open(f"csv:{path}")
    for step in range(3):
        exporter.write([Point(step, 1.0, {f"parameter {number}": number / 7 for number in range(20_000)})])
    exporter.close()
    again = parse_exporter("--log-metrics", f"csv:{path}")("job-1")
    assert again.open(-1) == 2
    again.close()


def test_new_key_widens_the_table(tmp_path: Path) -> None:
    """Rows before a key have an empty cell; the file keeps its mode and its link."""
    target = tmp_path / "target.csv"
    path = tmp_path / "loss.csv"
    exporter = _open(f"csv:{target}")
    exporter.write([Point(0, 1.0, {"a": 1.0})])
    target.chmod(0o600)
    path.symlink_to(target)
    exporter.close()
    exporter = _open(f"csv:{path}")
    exporter.write([Point(1, 2.0, {"b": 2.0}), Point(2, 3.0, {"a": 3.0, "step": 5.0})])
    exporter.close()
    rows = [line.split(",") for line in path.read_text().splitlines()]
    assert rows == [
        ["step", "time", "run", "a", "b", "step_"],
        ["0", "1.0", "job-1", "1.0", "", ""],
        ["1", "2.0", "job-1", "", "2.0", ""],
        ["2", "3.0", "job-1", "3.0", "", "5.0"],
    ]
    assert path.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600


def test_going_back_keeps_the_abandoned_lines_aside(tmp_path: Path) -> None:
    """The lines after the step are moved to a file of their own, each time."""
    path = tmp_path / "loss.csv"
    for number, name in enumerate(("loss.after-1.csv", "loss.after-1-2.csv")):
        exporter = _open(f"csv:{path}", go_back_to=1)
        assert exporter.flush() == (1 if number else -1)
        exporter.write([Point(step, 1.0, {"a": step + number}) for step in range(exporter.flush() + 1, 4)])
        exporter.close()
        exporter = parse_exporter("--log-metrics", f"csv:{path}")("job-1")
        assert exporter.open(3, go_back_to=1) == 1
        exporter.close()
        assert _read_csv(path) == {0: {"a": 0.0}, 1: {"a": 1.0}}
        assert _read_csv(tmp_path / name) == {2: {"a": 2.0 + number}, 3: {"a": 3.0 + number}}
    assert len(list(tmp_path.iterdir())) == 3


def test_file_of_an_earlier_job_keeps_nothing(tmp_path: Path) -> None:
    """Its step 0 is no point of this job."""
    path = tmp_path / "loss.csv"
    exporter = _open(f"csv:{path}")
    exporter.write([Point(step, 1.0, {"a": 1.0}) for step in range(2)])
    exporter.close()
    assert exporter.open(-1, go_back_to=-1) == -1
    exporter.close()
    assert _read_csv(path) == {}
    assert _read_csv(tmp_path / "loss.after-0.csv") == {0: {"a": 1.0}, 1: {"a": 1.0}}


def test_json_has_no_nan(tmp_path: Path) -> None:
    """Parsers other than Python's refuse NaN and Infinity; float() reads these words."""
    path = tmp_path / "loss.jsonl"
    exporter = _open(f"jsonl:{path}")
    exporter.write([Point(0, 1.0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1})])
    exporter.close()
    row = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert row == {
        "step": 0,
        "time": 1.0,
        "run": "job-1",
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
        "d": 1.0,
    }


@pytest.mark.parametrize(
    "content", ["hello", "a,b\n1,2\n", "\n", "step,time,run,a\nx,1,job-1,2\n", '{"a": 1}\n']
)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_other_files_are_left_alone(kind: str, content: str, tmp_path: Path) -> None:
    """A file that this exporter did not write is an error, and stays as it is."""
    path = tmp_path / "loss"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no file of logged values"):
        _open(f"{kind}:{path}")
    assert path.read_text() == content


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_file_of_another_run_is_left_alone(kind: str, tmp_path: Path) -> None:
    """Else the steps that the other run has would be missing."""
    path = tmp_path / "loss"
    exporter = _open(f"{kind}:{path}", run="job-2")
    exporter.write([Point(7, 1.0, {"a": 1.0})])
    exporter.close()
    content = path.read_text()
    with pytest.raises(ConfigError, match="holds the values of run 'job-2', and this is run 'job-1'"):
        _open(f"{kind}:{path}", go_back_to=3)
    assert path.read_text() == content
    _open(f"{kind}:{path}", run="job-2").close()  # it is not locked


def test_device_is_refused() -> None:
    """Replacing /dev/null would break the machine."""
    with pytest.raises(ConfigError, match="no regular file"):
        _open("csv:/dev/null")


def test_two_writers_exclude_each_other(tmp_path: Path) -> None:
    """Also after the first one has replaced the file."""
    path = tmp_path / "loss.csv"
    first = _open(f"csv:{path}")
    for values in ({"a": 1.0}, {"b": 1.0}):
        first.write([Point(first.flush() + 1, 1.0, values)])
        with pytest.raises(MachineError, match="being written by another process"):
            _open(f"csv:{path}")
    first.close()
    _open(f"csv:{path}").close()


def test_foreign_bytes_are_noticed(tmp_path: Path) -> None:
    """Where locks exclude nobody, the bytes of a second writer tell."""
    path = tmp_path / "loss.csv"
    exporter = _open(f"csv:{path}")
    exporter.write([Point(0, 1.0, {"a": 1.0})])
    with path.open("a") as file:
        file.write("1,1.0,job-1,1.0\n")
    with pytest.raises(MachineError, match="changed by another process"):
        exporter.write([Point(1, 1.0, {"a": 1.0})])
    exporter.close()


_FULL_DISK = """
import resource, signal, sys
from elastic_resume.errors import MachineError
from elastic_resume.mechanisms.curves.exporter import Point, parse_exporter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
exporter = parse_exporter("--log-metrics", sys.argv[1])("job-1")
assert exporter.open(-1) == 0
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), limits[1]))
try:
    exporter.write([Point(1, 1.0, {"a": 1.0})])
    sys.exit("the write succeeded")
except MachineError as error:
    assert "cannot write" in str(error), error
with open(sys.argv[1].partition(":")[2]) as file:
    assert file.read().endswith("\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
exporter.write([Point(1, 1.0, {"a": 1.0})])
assert exporter.flush() == 1
"""


def test_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """A write that fails in the middle of a line is taken back, and can be tried again."""
    path = tmp_path / "loss.csv"
    exporter = _open(f"csv:{path}")
    exporter.write([Point(0, 1.0, {"a": 1.0})])
    exporter.close()
    size = path.stat().st_size
    subprocess.run([sys.executable, "-c", _FULL_DISK, f"csv:{path}", str(size + 5)], check=True)
    assert list(_read_csv(path)) == [0, 1]


def test_close_may_be_called_again(tmp_path: Path) -> None:
    """Also before `open`, and no descriptor is left."""
    exporter = parse_exporter("--log-metrics", f"csv:{tmp_path / 'loss.csv'}")("job-1")
    exporter.close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    exporter.open(-1)
    exporter.write([])
    exporter.close()
    exporter.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_file_with_very_many_columns_is_opened_again(tmp_path: Path) -> None:
    """Their line has more than a MiB: a part of it must not become a row."""
    path = tmp_path / "values.csv"
    exporter = _open(f"csv:{path}")
    for step in range(1, 8):
        exporter.write([Point(step, 1.0, {f"{'k' * 180}/{step}/{key}": 0.5 for key in range(900)})])
    exporter.close()
    assert len(path.read_bytes().partition(b"\n")[0]) > 1 << 20
    exporter = _open(f"csv:{path}")
    exporter.write([Point(8, 1.0, {"loss": 0.25})])
    exporter.close()
    found = _read_csv(path)
    assert [len(values) for values in found.values()] == [*[900] * 7, 1]
    assert found[8] == {"loss": 0.25}
