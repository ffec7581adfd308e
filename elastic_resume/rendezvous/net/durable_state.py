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
from elastic_resume.errors import NodeFileError
from elastic_resume.rendezvous.core.events import PersistentState
from elastic_resume.rendezvous.core.quorum import QuorumState
from elastic_resume.rendezvous.net import protocol

RENDEZVOUS_STATE_FILE = "rendezvous.json"
FORCE_QUORUM_FILE = "force-quorum.json"
"""Written by ``elastic-resume force-quorum`` and removed once the agent has taken it in."""


class DurableStateFile:
    """The file of one node."""

    def __init__(self, node_dir: Path, disk: Disk = DISK, launch_id: str = "", node: str = "") -> None:
        """Read what a former life of ``node`` left.

        ``launch`` names this start of the job, if the scheduler tells.

        Raises:
            RecordError: the file exists and cannot be read, or is another node's.

        """
        self._path = node_dir / RENDEZVOUS_STATE_FILE
        self._disk = disk
        self._launch_id = launch_id
        self._node = node
        self.state = self._load()

    def write(self, state: PersistentState) -> None:
        """Return when ``memory`` is durable in place of what was there.

        Raises:
            MachineError: the disk refuses.

        """
        failpoints.hit("rendezvous.record")
        said = protocol.to_json_value(state)
        text = json.dumps(
            {"memory": said, "digest": _compute_digest(said), "launch": self._launch_id},
            separators=(",", ":"),
        )
        self._disk.write_atomic(self._path, text.encode())
        self.state = state

    def request_force_quorum(self, generation: int) -> None:
        """Leave ``generation``, whose missing members an operator declares dead, for this node's agent.

        Raises:
            MachineError: the disk refuses.

        """
        self._disk.write_atomic(
            self._path.with_name(FORCE_QUORUM_FILE), f'{{"generation": {generation}}}\n'.encode()
        )

    def read_force_request(self) -> int | None:
        """Return the generation that `order_force` left; None where there is none, or it cannot be read."""
        try:
            said = json.loads(self._path.with_name(FORCE_QUORUM_FILE).read_bytes())
            generation = said["generation"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return generation if type(generation) is int else None

    def remove_force_request(self) -> None:
        """Remove what `order_force` left."""
        with contextlib.suppress(OSError):
            self._path.with_name(FORCE_QUORUM_FILE).unlink()

    def _load(self) -> PersistentState | None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            said = json.loads(data)
            whole = said["digest"] == _compute_digest(said["memory"])
            memory = protocol.from_json_value(PersistentState, said["memory"]) if whole else None
            before = str(said.get("launch", ""))
        except (ValueError, KeyError, TypeError, RecursionError, protocol.ProtocolError):
            memory = None
        if memory is None:
            raise NodeFileError(
                f"{self._path} is damaged. It records in which worlds this node took part. While other nodes "
                "of the job run, start this one with another --node-name; when none runs, remove the file."
            )
        if self._node and memory.incarnation.node != self._node:
            raise NodeFileError(
                f"{self._path} belongs to node {memory.incarnation.node!r}, and this is {self._node!r}: a directory "
                "was copied or renamed. Give this node a --node-name and --ckpt-dir of its own, or remove it."
            )
        if before and self._launch_id and before != self._launch_id:
            return replace(memory, quorum_state=QuorumState(memory.quorum_state.candidate_count))
        return memory


def _compute_digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, separators=(",", ":"), sort_keys=True).encode())
