"""Write points to TensorBoard's event files, in a directory of the job.

Each writer begins a new file with what ``SummaryWriter(purge_step=…)`` writes: the start of a session, at
which readers drop the steps from there on of the files before. Readers take files in the order of their
names, which begin with a time. So the name of a new file is later than all that are there, whatever a
node's clock says. A step is one record: a kill can cut no step in two.

`SummaryWriter` is not used, because its thread keeps points that `flush` cannot make durable, its file's name
has only the clock, and it imports TensorFlow where that is installed.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_resume.checkpoint.atomic_io import DISK
from elastic_resume.mechanisms.curves.exporter import Exporter, Point

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

_NAME_PATTERN = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class TensorBoardDirectory(Exporter):
    """Writes to ``DIRECTORY/RUN_ID``, which TensorBoard shows as one run."""

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directory = directory / run_id
        self._path = self._directory
        self._descriptor = -1
        self._records: RecordWriter | None = None
        self._last_step = -1

    def open(self, last_written: int, go_back_to: int | None = None) -> int:
        """Begin a new file, in which the next step follows the last one that is known to be written."""
        self.close()
        DISK.make_dirs(self._directory)
        files = _list_files(self._directory)
        self._last_step = -1
        if files:
            self._last_step = last_written if last_written >= 0 else _find_last_step(files[-1])
        if go_back_to is not None:
            self._last_step = min(self._last_step, go_back_to)
        self._begin_file(files)
        self.flush()
        return self._last_step

    def _begin_file(self, files: Sequence[Path]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415 - an extra
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

        newest = max(map(_find_time, files), default=0)
        stamp = max(int(time.time()), newest + 1)
        name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._path = self._directory / name
        self._descriptor = DISK.create(self._path)
        DISK.sync_dir(self._directory)
        self._records = RecordWriter(_File(self._descriptor, self._path))
        self._write([Event(wall_time=time.time(), file_version="brain.Event:2")])
        if files:
            start = SessionLog(status=SessionLog.START)
            self._write([Event(wall_time=time.time(), step=self._last_step + 1, session_log=start)])

    def _write(self, events: Iterable[Event]) -> None:
        if self._records is None:
            raise ValueError("the exporter is closed")
        for event in events:
            self._records.write(event.SerializeToString())

    def write(self, points: Sequence[Point]) -> None:
        """Append a record for each point. TensorBoard keeps values with 32 bits, as SummaryWriter does."""
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 - an extra
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415

        for point in points:
            values = [Summary.Value(tag=key, simple_value=value) for key, value in point.values.items()]
            self._write([Event(wall_time=point.time, step=point.step, summary=Summary(value=values))])
            self._last_step = point.step

    def flush(self) -> int:
        """Sync the file."""
        DISK.sync_file(self._descriptor, self._path)
        return self._last_step

    def close(self) -> None:
        """Sync and close the file."""
        if self._descriptor >= 0:
            descriptor, self._descriptor, self._records = self._descriptor, -1, None
            try:
                DISK.sync_file(descriptor, self._path)
            finally:
                DISK.close(descriptor, self._path)


class _File:
    """What a RecordWriter writes to: each record at once, so that a kill loses none."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    def write(self, data: bytes) -> None:
        DISK.write(self._descriptor, data, self._path)


def _list_files(directory: Path) -> list[Path]:
    """Return the event files in the order in which TensorBoard reads them."""
    return sorted(path for path in directory.iterdir() if _NAME_PATTERN.match(path.name))


def _find_time(path: Path) -> int:
    match = _NAME_PATTERN.match(path.name)
    return int(match[1]) if match else 0


def _find_last_step(file: Path) -> int:
    """Return the last step that is surely there: the last record of the newest file that can be read."""
    from tensorboard.backend.event_processing.event_file_loader import (  # noqa: PLC0415 - an extra
        LegacyEventFileLoader,
    )

    last_step = -1
    for event in LegacyEventFileLoader(str(file)).Load():
        if event.HasField("session_log"):
            last_step = event.step - 1
        elif event.HasField("summary"):
            last_step = event.step
    return last_step
