"""Write points to a file with one line per step: CSV or JSON.

The file is repaired, never trusted: a line that a kill has cut is removed at `open`, and what is there
counts, whatever the earlier writer was known to have written. Lines are appended and synced. A change of
earlier lines (a new column, the return to an earlier step) replaces the file atomically. A lock keeps two
writers apart; where locks exclude nobody, a writer notices bytes that it did not write.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import io
import json
import math
import os
import stat
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from elastic_resume.checkpoint.atomic_io import DISK, temporary_name, translate_os_errors
from elastic_resume.constants import TEMPORARY_PREFIX
from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.mechanisms.curves.exporter import Exporter, Point

RESERVED = ("step", "time", "run")
"""The columns before the values. A value with one of these names is written with `_` after it."""
_TAIL_BYTES = 1 << 16
_COPY_BYTES = 1 << 20
_MAX_HEAD_BYTES = 1 << 28
"""Of the line with the columns; another file's first line may have no end."""
_ERRNOS_NO_LOCK = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


class _LineFile(Exporter):
    """Appends a line per point to one file, whose lines begin with the step or name it."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._descriptor = -1
        self._size = 0
        self._last_step = -1
        self._last_synced = -1

    @abstractmethod
    def _read_head(self, first_line: bytes, *, is_whole: bool) -> int:
        """Note the columns of the file; return the bytes before the first point.

        Raises:
            ConfigError: it is another file.

        """

    @abstractmethod
    def _parse(self, line: bytes) -> tuple[int, str]:
        """Return step and run id of a line.

        Raises:
            ValueError: it is no line of such a file.

        """

    @abstractmethod
    def _encode(self, points: Sequence[Point]) -> bytes:
        """Return the lines of points; `_prepare` was called before."""

    def _prepare(self, points: Sequence[Point]) -> None:
        """Make the file ready for these points."""

    def open(self, last_written: int, go_back_to: int | None = None) -> int:
        """Open the file, and return the step of its last whole line."""
        del last_written  # the file tells more
        self.close()
        if self._path.exists() and not stat.S_ISREG(self._path.stat().st_mode):
            raise ConfigError(f"{self._path} is no regular file: name another one for the logged values.")
        self._path = self._path.resolve()  # a link stays one when the file is replaced
        DISK.make_dirs(self._path.parent)
        self._descriptor = self._lock_file()
        try:
            return self._read_file(go_back_to)
        except BaseException:
            self._last_synced = self._last_step
            self.close()
            raise

    def _read_file(self, go_back_to: int | None) -> int:
        for leftover in self._path.parent.glob(f"{TEMPORARY_PREFIX}{self._path.name}-*"):
            DISK.unlink(leftover)
        end = self._find_end()
        head_bytes = self._read_head(self._read_first_line(), is_whole=end > 0)
        last_step = self._read_last_step(head_bytes, end)
        self._truncate(end)
        if go_back_to is not None and last_step > go_back_to:
            self._remove_after(go_back_to, head_bytes)
            last_step = self._read_last_step(head_bytes, self._size)
        DISK.sync_file(self._descriptor, self._path)  # what an earlier writer may have left unsynced
        self._last_step = self._last_synced = last_step
        return last_step

    def _lock_file(self) -> int:
        """Return a descriptor of the file, which no other process can have locked then."""
        while True:
            with translate_os_errors("open", self._path):
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                self._lock(descriptor)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                        return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its owner has replaced it meanwhile

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MachineError(
                f"{self._path} is being written by another process: end that one, or log the values to "
                "another file."
            ) from error
        except OSError as error:
            if error.errno not in _ERRNOS_NO_LOCK:
                raise

    def _find_end(self) -> int:
        """Return the end of the last whole line before the first zero byte, which a power cut may leave."""
        end = os.fstat(self._descriptor).st_size
        while end:
            start = max(0, end - _TAIL_BYTES)
            lines, newline, _ = self._read(start, end).partition(b"\0")[0].rpartition(b"\n")
            if newline:
                return start + len(lines) + 1
            end = start
        return 0

    def _read_first_line(self) -> bytes:
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            return file.readline(_MAX_HEAD_BYTES).rstrip(b"\n")

    def _read(self, start: int, end: int) -> bytes:
        with translate_os_errors("read", self._path):
            return os.pread(self._descriptor, end - start, start)

    def _truncate(self, size: int) -> None:
        with translate_os_errors("truncate", self._path):
            os.ftruncate(self._descriptor, size)
        self._size = size

    def _read_last_step(self, head_bytes: int, end: int) -> int:
        """Return the step of the last line; a file without lines has -1."""
        start, lines = end, [b""]
        while start > head_bytes and len(lines) < 2:  # the first of them may be cut
            start = max(head_bytes, start - _TAIL_BYTES)
            lines = self._read(start, end).removesuffix(b"\n").split(b"\n")
        return self._parse_own(lines[-1]) if end > head_bytes else -1

    def _parse_own(self, line: bytes) -> int:
        """Return the step of a line of this job."""
        try:
            step, run_id = self._parse(line)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise self._foreign() from error
        if run_id != self._run_id:
            raise ConfigError(
                f"{self._path} holds the values of run {run_id!r}, and this is run {self._run_id!r}: move "
                "the file away, or log the values to another one."
            )
        return step

    def _foreign(self) -> ConfigError:
        return ConfigError(
            f"{self._path} exists, and is no file of logged values: move it away, or log the values to "
            "another one."
        )

    def _remove_after(self, step: int, head_bytes: int) -> None:
        """Move the lines of later steps into a file beside this one."""
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(head_bytes)
            kept_bytes = head_bytes
            for line in file:
                if self._parse_own(line.rstrip(b"\n")) > step:
                    break
                kept_bytes += len(line)
        aside = _find_free_name(self._path, f"after-{max(step, 0)}")
        self._write_file(aside, lambda: self._ranges((0, head_bytes), (kept_bytes, self._size)))
        self._replace(lambda: self._ranges((0, kept_bytes)))

    def _ranges(self, *ranges: tuple[int, int]) -> Iterator[bytes]:
        for start, end in ranges:
            for position in range(start, end, _COPY_BYTES):
                yield self._read(position, min(end, position + _COPY_BYTES))

    def _write_file(self, path: Path, chunks: Callable[[], Iterator[bytes]]) -> None:
        descriptor = DISK.create(path)
        try:
            for chunk in chunks():
                DISK.write(descriptor, chunk, path)
            DISK.sync_file(descriptor, path)
        finally:
            DISK.close(descriptor, path)
        DISK.sync_dir(path.parent)

    def _replace(self, chunks: Callable[[], Iterator[bytes]]) -> None:
        """Replace the file atomically; the new one is locked before it has the name."""
        temporary = self._path.with_name(temporary_name(self._path.name))
        descriptor = -1
        try:
            self._write_file(temporary, chunks)
            descriptor = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
            self._lock(descriptor)
            DISK.rename(temporary, self._path)
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            with contextlib.suppress(MachineError):
                DISK.unlink(temporary)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        DISK.sync_dir(self._path.parent)

    def write(self, points: Sequence[Point]) -> None:
        """Append the lines of points."""
        if not points:
            return
        if os.fstat(self._descriptor).st_size != self._size:
            raise MachineError(
                f"{self._path} was changed by another process: let one job write to it, or log the values to "
                "another file."
            )
        self._prepare(points)
        data = self._encode(points)
        try:
            DISK.write(self._descriptor, data, self._path)
        except BaseException:
            with contextlib.suppress(OSError):  # `open` repairs it too
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)
        self._last_step = points[-1].step

    def flush(self) -> int:
        """Sync the file."""
        if self._last_synced != self._last_step:
            DISK.sync_file(self._descriptor, self._path)
            self._last_synced = self._last_step
        return self._last_synced

    def close(self) -> None:
        """Sync and unlock the file."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                if self._last_synced != self._last_step:
                    DISK.sync_file(descriptor, self._path)
            finally:
                os.close(descriptor)


class CsvFile(_LineFile):
    """A table with a column per key. A key that comes later gets a column, empty in the rows before."""

    def __init__(self, path: Path, run_id: str) -> None:
        super().__init__(path, run_id)
        self._columns: list[str] = []

    def _read_head(self, first_line: bytes, *, is_whole: bool) -> int:
        if not is_whole and not first_line:
            self._columns = []
            return 0
        try:
            columns = next(csv.reader([first_line.decode()]))
        except (UnicodeDecodeError, csv.Error, StopIteration) as error:
            raise self._foreign() from error
        if not is_whole or tuple(columns[:3]) != RESERVED:
            raise self._foreign()  # a file of ours has its first line from the beginning
        self._columns = columns
        return len(first_line) + 1

    def _parse(self, line: bytes) -> tuple[int, str]:
        step, _, run_id = next(csv.reader([line.decode()]))[:3]
        return int(step), run_id

    def _prepare(self, points: Sequence[Point]) -> None:
        names = dict.fromkeys(_name_column(key) for point in points for key in point.values)
        known = set(self._columns)
        columns = [*(self._columns or RESERVED), *(name for name in names if name not in known)]
        if columns == self._columns:
            return
        head_bytes = len(_encode_row(self._columns)) if self._columns else 0
        more = b"," * (len(columns) - len(self._columns)) + b"\n"

        def add_columns() -> Iterator[bytes]:
            yield _encode_row(columns)
            for chunk in self._ranges((head_bytes, self._size)):
                yield chunk.replace(b"\n", more)

        self._replace(add_columns)
        self._columns = columns

    def _encode(self, points: Sequence[Point]) -> bytes:
        rows = []
        for point in points:
            values = {_name_column(key): repr(float(value)) for key, value in point.values.items()}
            cells = (values.get(column, "") for column in self._columns[len(RESERVED) :])
            rows.append(_encode_row([str(point.step), repr(point.time), self._run_id, *cells]))
        return b"".join(rows)


class JsonLinesFile(_LineFile):
    """One JSON object per line. JSON has no nan and inf: they are "NaN", "Infinity" and "-Infinity"."""

    def _read_head(self, first_line: bytes, *, is_whole: bool) -> int:
        begin = b'{"step": '
        if not is_whole and begin.startswith(first_line[: len(begin)]):
            return 0
        try:
            self._parse(first_line)
        except (ValueError, KeyError, TypeError) as error:
            raise self._foreign() from error
        return 0

    def _parse(self, line: bytes) -> tuple[int, str]:
        entry = json.loads(line)
        return int(entry["step"]), str(entry["run"])

    def _encode(self, points: Sequence[Point]) -> bytes:
        lines = []
        for point in points:
            values = {_name_column(key): _to_json(value) for key, value in point.values.items()}
            entry = {"step": point.step, "time": point.time, "run": self._run_id, **values}
            lines.append(json.dumps(entry, allow_nan=False) + "\n")
        return "".join(lines).encode()


def _name_column(key: str) -> str:
    name = " ".join(key.split("\n")).replace("\r", " ")  # a row is one line
    return name + "_" if name.rstrip("_") in RESERVED else name


def _to_json(value: float) -> float | str:
    number = float(value)
    if math.isnan(number):
        return "NaN"
    return number if math.isfinite(number) else "Infinity" if number > 0 else "-Infinity"


def _encode_row(cells: Sequence[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _find_free_name(path: Path, label: str) -> Path:
    """Return a path beside ``path`` that does not exist yet: ``loss.after-120.csv``."""
    number = 1
    while True:
        name = f"{path.stem}.{label}{f'-{number}' if number > 1 else ''}{path.suffix}"
        if not path.with_name(name).exists():
            return path.with_name(name)
        number += 1
