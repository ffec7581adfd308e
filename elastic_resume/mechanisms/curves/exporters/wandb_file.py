"""Read which steps a W&B run file has: W&B for Python can write such files, and only its program reads them.

A ``.wandb`` file has seven bytes of its own, then a log of LevelDB with a ``Record`` of W&B's protocol per
entry: https://github.com/google/leveldb/blob/main/doc/log_format.md. An entry that was not written whole
ends it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_BLOCK_BYTES = 32768
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = range(1, 5)


class StepReader:
    """Follows the steps of one file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_step = -1
        self.restarts_after: int | None = None
        """The step after which the file drops those of earlier files; None: it continues them."""
        self._offset = _HEADER.size  # of the next whole entry

    def read(self) -> int:
        """Read what is new; return the last step that the file has, or -1."""
        from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415 - an extra

        for data in self._read_entries():
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                self.last_step = record.history.step.num
            elif kind == "run" and self.last_step < 0:
                if record.run.HasField("branch_point"):
                    self.last_step = self.restarts_after = int(record.run.branch_point.value)
                elif not record.run.resume:
                    self.restarts_after = -1
        return self.last_step

    def _read_entries(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                start = self._offset - self._offset % _BLOCK_BYTES
                file.seek(start)
                content = file.read()
        except FileNotFoundError:
            return
        position = self._offset - start
        parts: list[bytes] = []
        while position + _HEADER.size <= len(content):
            left = _BLOCK_BYTES - position % _BLOCK_BYTES
            if left < _HEADER.size:  # the writer fills a block's end with zeros
                position += left
                continue
            checksum, size, kind = _HEADER.unpack_from(content, position)
            body = content[position + _HEADER.size : position + _HEADER.size + size]
            position += _HEADER.size + size
            if not _FULL <= kind <= _LAST or zlib.crc32(bytes((kind,)) + body) != checksum:
                return
            parts = [*parts, body] if kind in {_MIDDLE, _LAST} else [body]
            if kind in {_FULL, _LAST}:
                self._offset = start + position
                yield b"".join(parts)
