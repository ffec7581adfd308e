"""Keep the rendezvous state of a node on disk, across restarts of its agent.

It is one small JSON file, replaced atomically and durably. The votes rely on it, so an unreadable file is an
error. If it were treated as missing, both halves of a partition could continue.

When a scheduler restarts the whole job, all its old processes have ended. Earlier views then have no vote:
their members may be other nodes now, and the job would wait for them for ever.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import xxhash

from elastic_resume import constants, failpoints
from elastic_resume.checkpoint.atomic_io import DISK, Disk
from elastic_resume.errors import NodeFileError
from elastic_resume.rendezvous.core.world import NO_VIEW, PersistentState
from elastic_resume.rendezvous.net import codec

RENDEZVOUS_STATE_FILE = constants.RENDEZVOUS_STATE_FILE


class DurableStateFile:
    """The state file of one node."""

    def __init__(self, node_dir: Path, disk: Disk = DISK, launch_id: str = "", node: str = "") -> None:
        """Read what an earlier agent of ``node`` wrote.

        ``launch_id`` names this start of the job, if the scheduler has ended all processes of the last one.

        Raises:
            NodeFileError: the file exists and cannot be read, or is another node's.

        """
        self._path = node_dir / RENDEZVOUS_STATE_FILE
        self._disk = disk
        self._launch_id = launch_id
        self._node = node
        self.state = self._load()

    def write(self, state: PersistentState) -> None:
        """Replace the file; return when ``state`` is durable.

        Raises:
            MachineError: the write failed.

        """
        failpoints.hit("rendezvous.record")
        value = codec.to_json_value(state)
        text = json.dumps(
            {"memory": value, "digest": _compute_digest(value), "launch": self._launch_id},
            separators=(",", ":"),
        )
        self._disk.write_atomic(self._path, text.encode())
        self.state = state

    def _load(self) -> PersistentState | None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        state, launch_id = None, ""
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError, codec.ProtocolError):
            record = json.loads(data)
            if record["digest"] == _compute_digest(record["memory"]):
                launch_id = str(record.get("launch", ""))
                state = codec.from_json_value(PersistentState, record["memory"])
        if state is None:
            raise NodeFileError(
                f"{self._path} is damaged. It records in which views this node took part. While other nodes "
                "of the job run, start this one with another ELASTIC_RESUME_NODE_NAME; when none runs, "
                "remove the file."
            )
        if self._node and state.incarnation.node != self._node:
            raise NodeFileError(
                f"{self._path} belongs to node {state.incarnation.node!r}, but this is node "
                f"{self._node!r}: a directory was copied or renamed. Set ELASTIC_RESUME_NODE_NAME and "
                "--ckpt-dir of its own, or remove the file."
            )
        if launch_id and self._launch_id and launch_id != self._launch_id:
            return state.with_view(NO_VIEW)
        return state


def _compute_digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, separators=(",", ":"), sort_keys=True).encode())
