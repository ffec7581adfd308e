"""What an agent keeps on disk of the rendezvous, across its lives.

One small file, replaced atomically and durably. It holds what the quorum rests on, so one that exists and
cannot be read is an error: taking it for "knows nothing" could let two halves of a partition both go on.

Where a scheduler has ended the whole job before it started it again (`cluster.node.launch`), that is its word
that the worlds of before are over, and they are not asked: the nodes are others now, and would wait in vain.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import xxhash

from elastic_resume import failpoints
from elastic_resume.checkpoint.atomic_io import DISK, Disk
from elastic_resume.errors import RecordError
from elastic_resume.rendezvous.core.events import Memory
from elastic_resume.rendezvous.core.quorum import Knowledge
from elastic_resume.rendezvous.net import protocol

RECORD_FILE = "rendezvous.json"
FORCE_FILE = "force-quorum.json"
"""Written by ``elastic-resume force-quorum`` and removed once the agent has taken it in."""


class Record:
    """The file of one node."""

    def __init__(self, node_dir: Path, disk: Disk = DISK, launch: str = "", node: str = "") -> None:
        """Read what a former life of ``node`` left.

        ``launch`` names this start of the job, if the scheduler tells.

        Raises:
            RecordError: the file exists and cannot be read, or is another node's.

        """
        self._path = node_dir / RECORD_FILE
        self._disk = disk
        self._launch = launch
        self._node = node
        self.memory = self._read()

    def write(self, memory: Memory) -> None:
        """Return when ``memory`` is durable in place of what was there.

        Raises:
            MachineError: the disk refuses.

        """
        failpoints.hit("rendezvous.record")
        said = protocol.to_plain(memory)
        text = json.dumps(
            {"memory": said, "digest": _digest(said), "launch": self._launch}, separators=(",", ":")
        )
        self._disk.write_atomic(self._path, text.encode())
        self.memory = memory

    def order_force(self, generation: int) -> None:
        """Leave ``generation``, whose missing members an operator declares dead, for this node's agent.

        Raises:
            MachineError: the disk refuses.

        """
        self._disk.write_atomic(
            self._path.with_name(FORCE_FILE), f'{{"generation": {generation}}}\n'.encode()
        )

    def read_force(self) -> int | None:
        """Return the generation that `order_force` left; None where there is none, or it cannot be read."""
        try:
            said = json.loads(self._path.with_name(FORCE_FILE).read_bytes())
            generation = said["generation"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return generation if type(generation) is int else None

    def drop_force(self) -> None:
        """Remove what `order_force` left."""
        with contextlib.suppress(OSError):
            self._path.with_name(FORCE_FILE).unlink()

    def _read(self) -> Memory | None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            said = json.loads(data)
            whole = said["digest"] == _digest(said["memory"])
            memory = protocol.from_plain(Memory, said["memory"]) if whole else None
            before = str(said.get("launch", ""))
        except (ValueError, KeyError, TypeError, RecursionError, protocol.WireError):
            memory = None
        if memory is None:
            raise RecordError(
                f"{self._path} is damaged. It records in which worlds this node took part. While other nodes "
                "of the job run, start this one with another --node-name; when none runs, remove the file."
            )
        if self._node and memory.me.node != self._node:
            raise RecordError(
                f"{self._path} belongs to node {memory.me.node!r}, and this is {self._node!r}: a directory "
                "was copied or renamed. Give this node a --node-name and --ckpt-dir of its own, or remove it."
            )
        if before and self._launch and before != self._launch:
            return replace(memory, knowledge=Knowledge(memory.knowledge.candidates))
        return memory


def _digest(said: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(said, separators=(",", ":"), sort_keys=True).encode())
