from __future__ import annotations

import time
from pathlib import Path

import pytest

from elastic_resume.mechanisms.curves.exporter import Exporter, Point, parse_exporter
from tests.support.killed_writers import assert_equal_points, to_float32, write_with_kills

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def _open(directory: Path, last_written: int = -1, go_back_to: int | None = None) -> tuple[Exporter, int]:
    exporter = parse_exporter("--log-metrics", f"tensorboard:{directory}")("job-1")
    return exporter, exporter.open(last_written, go_back_to)


def _write(directory: Path, last_written: int, last_step: int, value: float = 1.0) -> int:
    """Write the points that `open` asks for."""
    exporter, last = _open(directory, last_written)
    exporter.write([Point(step, 1.0, {"a": value}) for step in range(last + 1, last_step + 1)])
    assert exporter.flush() == last_step
    exporter.close()
    return last


def _read(directory: Path) -> dict[int, dict[str, float]]:
    accumulator = EventAccumulator(str(directory / "job-1"), size_guidance={"scalars": 0})
    accumulator.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            values = found.setdefault(event.step, {})
            assert tag not in values
            values[tag] = event.value
    return found


@pytest.mark.slow
def test_kills_leave_each_step_once(tmp_path: Path) -> None:
    """TensorBoard's reader finds one point per step, whatever the killed writers had written."""
    write_with_kills(
        f"tensorboard:{tmp_path}", tmp_path, 300, modules=("tensorboard.compat.proto.event_pb2",)
    )
    assert_equal_points(_read(tmp_path), 300, to_float32)


def test_points_of_a_dead_writer_that_are_sent_again_are_purged(tmp_path: Path) -> None:
    """The reader drops what the earlier writer wrote after the last known step."""
    _write(tmp_path, -1, 5, 1.0)
    assert _write(tmp_path, 2, 7, 2.0) == 2
    assert _read(tmp_path) == {step: {"a": 1.0 if step <= 2 else 2.0} for step in range(8)}


def test_unknown_last_step_is_read_from_the_files(tmp_path: Path) -> None:
    """Else the points that nobody has any more would be purged."""
    _write(tmp_path, -1, 5, 1.0)
    assert _write(tmp_path, -1, 7, 2.0) == 5
    assert _write(tmp_path, -1, 7, 3.0) == 7
    assert _write(tmp_path, -1, 8, 4.0) == 7  # the newest file has no point
    assert [value["a"] for value in _read(tmp_path).values()] == [1.0] * 6 + [2.0, 2.0, 4.0]


def test_cut_record_at_any_byte_is_written_again(tmp_path: Path) -> None:
    """A record that is cut anywhere counts as missing; the records before it stay."""
    _write(tmp_path, -1, 2, 1.0)
    (file,) = (tmp_path / "job-1").iterdir()
    whole = file.read_bytes()
    start = whole.index(b"a\x15", whole.index(b"a\x15", whole.index(b"a\x15") + 1) + 1) - 40
    ends = [end for end in range(start, len(whole)) if _cut_and_write(tmp_path, file, whole[:end])]
    assert len(ends) > 20


def _cut_and_write(directory: Path, file: Path, content: bytes) -> bool:
    for other in (directory / "job-1").iterdir():
        other.unlink()
    file.write_bytes(content)
    last = _write(directory, -1, 3, 2.0)
    assert [value["a"] for value in _read(directory).values()] == [1.0] * (last + 1) + [2.0] * (3 - last)
    return last == 1


def test_new_file_is_read_last_whatever_the_clock_says(tmp_path: Path) -> None:
    """The earlier writer's node may have had a clock that was a day ahead."""
    _write(tmp_path, -1, 5, 1.0)
    (file,) = (tmp_path / "job-1").iterdir()
    file.rename(file.with_name(f"events.out.tfevents.{int(time.time()) + 86400:010d}.z.99999.0"))
    _write(tmp_path, 2, 4, 2.0)
    _write(tmp_path, 3, 4, 3.0)
    assert _read(tmp_path) == {0: {"a": 1.0}, 1: {"a": 1.0}, 2: {"a": 1.0}, 3: {"a": 2.0}, 4: {"a": 3.0}}


def test_empty_directory_of_another_machine_asks_for_all(tmp_path: Path) -> None:
    """What another machine's disk has is not in this directory."""
    exporter, last = _open(tmp_path / "new", last_written=7)
    assert last == -1
    exporter.close()


def test_going_back_purges_the_later_steps(tmp_path: Path) -> None:
    """The abandoned history is gone from the curves before the first new point."""
    _write(tmp_path, -1, 5, 1.0)
    exporter, last = _open(tmp_path, last_written=5, go_back_to=2)
    assert last == 2
    exporter.close()
    assert list(_read(tmp_path)) == [0, 1, 2]


def test_written_points_survive_without_flush(tmp_path: Path) -> None:
    """A killed process has nothing in a buffer of its own."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    exporter, _ = _open(tmp_path)
    exporter.write([Point(0, 1.0, {"a": 1.0})])
    assert _read(tmp_path) == {0: {"a": 1.0}}
    exporter.close()
    exporter.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
