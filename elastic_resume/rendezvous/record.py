"""What an agent keeps on disk of the rendezvous, across its lives.

One small file, replaced atomically and durably. It holds what the quorum rests on, so one that exists and
cannot be read is an error: taking it for "knows nothing" could let two halves of a partition both go on.
"""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from elastic_resume.errors import CorruptError
from elastic_resume.rendezvous import wire
from elastic_resume.rendezvous.steps import Memory
from elastic_resume.store.durable import DISK, Disk

RECORD_FILE = "rendezvous.json"


class Record:
    """The file of one node."""

    def __init__(self, node_dir: Path, disk: Disk = DISK) -> None:
        """Read what a former life left.

        Raises:
            CorruptError: the file exists and cannot be read.

        """
        self._path = node_dir / RECORD_FILE
        self._disk = disk
        self.memory = self._read()

    def write(self, memory: Memory) -> None:
        """Return when ``memory`` is durable in place of what was there.

        Raises:
            MachineError: the disk refuses.

        """
        said = wire.to_plain(memory)
        text = json.dumps({"memory": said, "digest": _digest(said)}, separators=(",", ":"))
        self._disk.write_atomic(self._path, text.encode())
        self.memory = memory

    def _read(self) -> Memory | None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            said = json.loads(data)
            whole = said["digest"] == _digest(said["memory"])
            memory = wire.from_plain(Memory, said["memory"]) if whole else None
        except (ValueError, KeyError, TypeError, RecursionError, wire.WireError):
            memory = None
        if memory is None:
            raise CorruptError(
                f"{self._path} cannot be read. It records in which worlds this node took part. If no agent "
                "of this job runs anywhere, remove the file and start again."
            )
        return memory


def _digest(said: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(said, separators=(",", ":"), sort_keys=True).encode())
