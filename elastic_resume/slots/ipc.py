"""Give workers access to their node's slots and committer, over a unix socket and shared memory.

A request is a message (`local_socket`) with a JSON object ``{"operation": ..., ...}``. Its answer, if it has
one, is another, with a file descriptor where one was requested. The socket has an abstract name of 128 random
bits. Each side asks the kernel whether the other runs as the same user. One connection serves one worker.

    operation          arguments               answer
    hello                                      {} and the control block's descriptor
    slot               index serial            {"capacity"} and the slot's descriptor, or {"missing": true}
    reserve            bytes all               {"slots"}: how many there will be; `SlotPool.reserve`
    commit             snapshot_id             {"path"} or {"error"}, after the commit
    start_generation   trusted_version keep    none; the generation's `RetentionPolicy`
    request_commit     snapshot_id             none
    offer              snapshot_id generation  none; mechanisms of the agent may read the snapshot

`SlotClient` reserves, maps, fills and reads slots for one local rank. Mapping and populating a large slot
takes a moment, so a thread does it, and `SlotClient.list_writable` returns only slots that are ready.
`capture` writes snapshots through it, and `restore` fills slots with received ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from elastic_resume.background import AcceptThread
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Manifest, encode_ways_back
from elastic_resume.checkpoint.writer import RetentionPolicy
from elastic_resume.errors import CheckpointError, ElasticResumeError, MachineError
from elastic_resume.local_socket import is_same_user, receive_message, send_message
from elastic_resume.slots import slot_memory, slot_pool
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.slots.progress_page import MAX_LOCAL_RANKS
from elastic_resume.slots.slot_memory import ControlBlock, Slot, SlotState

MAX_MESSAGE_BYTES = 64 * 1024
RESERVE_RETRY_S = 1.0  # a second slot may fit only after a smaller one was dropped
RESPONSE_TIMEOUT_S = 120.0  # allocating a large slot takes long


class SnapshotServer:
    """The committer's side: a thread per connection answers requests, from `start` to `close`."""

    def __init__(self, committer: CheckpointCommitter) -> None:
        self._committer = committer
        self.socket_name = f"elastic_resume-snapshots-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + self.socket_name)
        listener.listen(2 * MAX_LOCAL_RANKS)  # each worker's connection and its successor's
        self._accept_thread = AcceptThread("elastic-resume-snapshot-server", listener, self._serve_connection)

    def start(self) -> None:
        """Start answering."""
        self._accept_thread.start()

    def close(self) -> None:
        """Accept no more connections; requests in progress are still answered."""
        self._accept_thread.close()

    def _serve_connection(self, connection: socket.socket) -> None:
        if not is_same_user(connection):
            return
        with contextlib.suppress(
            OSError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError
        ):
            while True:
                request, _ = receive_message(connection, MAX_MESSAGE_BYTES)
                answer, descriptor = self._handle_request(json.loads(request))
                if answer is not None:
                    passed = [] if descriptor is None else [descriptor]
                    send_message(connection, json.dumps(answer).encode(), passed)

    def _handle_request(self, request: dict[str, Any]) -> tuple[dict[str, Any] | None, int | None]:
        """Return the answer to a request and a descriptor to pass; raise an error if it is invalid."""
        operation, committer, pool = request["operation"], self._committer, self._committer.slot_pool
        if operation == "hello":
            return {}, pool.control_descriptor
        if operation == "slot":
            descriptor = pool.slot_descriptor(request["index"], request["serial"])
            if descriptor is None:
                return {"missing": True}, None
            return {"capacity": pool.control_block.slot_record(request["index"]).get("capacity")}, descriptor
        if operation == "reserve":
            return {"slots": pool.reserve(request["bytes"], all_now=request.get("all", True))}, None
        if operation == "commit":
            return self._handle_commit(request["snapshot_id"]), None
        if operation == "start_generation":
            trusted, keep = request["trusted_version"], request["keep"]
            committer.start_generation(RetentionPolicy(tuple(trusted) if trusted else None, keep))
        elif operation == "request_commit":
            committer.request_commit(request["snapshot_id"])
        elif operation == "offer":
            committer.offer_snapshot(request["snapshot_id"], request["generation"])
        else:
            raise ValueError(f"unknown operation {operation!r}")
        return None, None

    def _handle_commit(self, snapshot_id: int) -> dict[str, Any]:
        try:
            path = self._committer.commit(snapshot_id)
        except MachineError as error:
            return {"error": str(error)[: MAX_MESSAGE_BYTES // 4]}
        return {"path": str(path) if path is not None else None}


class SnapshotClient:
    """A worker's connection; its threads may share it, but a fork must create its own."""

    def __init__(self, socket_name: str) -> None:
        """Connect to the committer's socket; raise ElasticResumeError if nothing answers there."""
        self._call_lock = threading.Lock()
        self._send_lock = threading.Lock()  # separate, so that `send` never waits for an answer to `call`
        self._socket_name = socket_name
        self._socket: socket.socket | None = None
        self.control_descriptor = -1  # of the control block; -1 while there is no connection
        try:
            _, self.control_descriptor = self.call("hello")
            if self.control_descriptor < 0:
                raise OSError("it sent no descriptor")  # noqa: TRY301
        except OSError as error:
            self.close()
            raise ElasticResumeError(
                f"this node's snapshot server does not answer ({error}): has the agent ended, or does this "
                "worker run in another network namespace? "
                "ELASTIC_RESUME_SNAPSHOT_MEMORY=off works without it."
            ) from error

    def send(self, operation: str, **fields: Any) -> None:
        """Send a request without an answer; errors are ignored, because a dead committer ends its workers."""
        with contextlib.suppress(OSError), self._send_lock:
            send_message(self._ensure_connected(), json.dumps({"operation": operation, **fields}).encode())

    def call(
        self, operation: str, *, timeout_s: float | None = RESPONSE_TIMEOUT_S, **fields: Any
    ) -> tuple[dict[str, Any], int]:
        """Send a request; return its answer and the descriptor that came with it, or -1.

        An OSError means that the committer exited, or did not answer within ``timeout_s``.
        """
        with self._call_lock:
            try:
                return self._send_and_receive({"operation": operation, **fields}, timeout_s)
            except OSError:
                # A late answer would be taken for the answer to the next request.
                with self._send_lock:
                    self._disconnect()
                raise

    def _send_and_receive(
        self, request: dict[str, Any], timeout_s: float | None
    ) -> tuple[dict[str, Any], int]:
        with self._send_lock:
            connection = self._ensure_connected()
            connection.settimeout(timeout_s)
            send_message(connection, json.dumps(request).encode())
        answer, descriptors = receive_message(connection, MAX_MESSAGE_BYTES, 1)
        return json.loads(answer), descriptors[0] if descriptors else -1

    def _ensure_connected(self) -> socket.socket:
        """Return the connection, reconnecting after a failure; hold ``_send_lock``."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._socket.connect("\0" + self._socket_name)
                if not is_same_user(self._socket):
                    raise OSError("the socket belongs to another user")  # noqa: TRY301
            except OSError:
                self._disconnect()
                raise
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Close the connection and the control block's descriptor."""
        with self._send_lock:
            self._socket_name = ""  # do not reconnect
            self._disconnect()
        descriptor, self.control_descriptor = self.control_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True)
class LocalSnapshot:
    """A complete snapshot of this node; its manifest's blocks have no digests yet."""

    slot: Slot
    snapshot_id: int
    manifest: Manifest
    image: memoryview


class SlotClient:
    """The slots of this node, for one of its local ranks."""

    def __init__(self, socket_name: str, local_rank: int, *, is_local_leader: bool) -> None:
        """Connect to the committer's socket; raise ElasticResumeError if it does not answer."""
        self.is_local_leader = is_local_leader
        self.local_rank = local_rank
        self.slot_count = slot_pool.SLOT_COUNT  # existing or planned; exact after `reserve`
        self.reserved_bytes = 0  # slot size for which `slot_count` is exact
        self._reserved_at = 0.0
        self._client = SnapshotClient(socket_name)
        self.control_block = ControlBlock(self._client.control_descriptor)
        self._slots: dict[tuple[int, int], Slot] = {}
        self._populated: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._prepare_thread: threading.Thread | None = None

    # ---- for snapshots ---------------------------------------------------------------------------------

    def prepare_slots(self, nbytes: int, *, is_estimate: bool = False) -> None:
        """Reserve (as local leader), map and populate slots of ``nbytes`` in a thread.

        ``is_estimate``: the true size is unknown, so do not record how many slots fit.
        """
        if self._prepare_thread is None or not self._prepare_thread.is_alive():
            self._reserved_at = time.monotonic()
            self._prepare_thread = threading.Thread(
                target=self._prepare, args=(nbytes, is_estimate), name="elastic-resume-slots", daemon=True
            )
            self._prepare_thread.start()

    def reserve(self, nbytes: int, *, is_estimate: bool = False, all_now: bool = True) -> int:
        """Reserve slots of ``nbytes``; return how many exist or are planned. See `SlotPool.reserve`.

        Only the local leader calls this.
        """
        count = 0
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            answer, _ = self._client.call("reserve", bytes=nbytes, all=all_now)
            count = int(answer["slots"])
        if not is_estimate:
            self.slot_count, self.reserved_bytes = count, nbytes
        return count

    def list_writable(self, nbytes: int) -> list[SlotState]:
        """Return the slots of at least ``nbytes`` that can be written without waiting."""
        fitting = [state for state in self.control_block.read_slots() if state.capacity >= nbytes]
        if nbytes <= slot_memory.SMALL_SLOT_BYTES:
            for state in fitting:
                self._map_and_populate(state)
        elif any((state.index, state.serial) not in self._populated for state in fitting):
            # The present capacity, so that the metadata has room to grow.
            self.prepare_slots(min(state.capacity for state in fitting))
        may_retry = time.monotonic() > self._reserved_at + RESERVE_RETRY_S
        if fitting and len(fitting) < self.slot_count and may_retry:
            self.prepare_slots(min(state.capacity for state in fitting))
        return [state for state in fitting if (state.index, state.serial) in self._populated]

    def map_slot(self, index: int, serial: int | None = None) -> Slot | None:
        """Map slot ``index``; return None if it no longer exists or cannot be mapped."""
        serial = self.control_block.slot_record(index).get("serial") if serial is None else serial
        with self._lock:
            if (index, serial) not in self._slots:
                self._unmap_stale()
                descriptor = -1
                try:
                    answer, descriptor = self._client.call("slot", index=index, serial=serial)
                    if descriptor < 0:
                        return None
                    record = self.control_block.slot_record(index)
                    self._slots[index, serial] = Slot(descriptor, int(answer["capacity"]), serial, record)
                except OSError:  # the committer has ended, or this process may map no more memory
                    return None
                finally:
                    if descriptor >= 0:
                        os.close(descriptor)
            return self._slots[index, serial]

    def find_slot(self, snapshot_id: int) -> Slot | None:
        """Map the slot assigned to ``snapshot_id``; return None if there is none."""
        for state in self.control_block.read_slots():
            if state.snapshot_id == snapshot_id:
                return self.map_slot(state.index, state.serial)
        return None

    def send(self, operation: str, **fields: Any) -> None:
        """Send the committer a request without an answer; see `ipc`."""
        self._client.send(operation, **fields)

    def commit(self, snapshot_id: int) -> dict[str, Any]:
        """Wait until the committer has committed ``snapshot_id``; return its answer."""
        answer, _ = self._client.call("commit", timeout_s=None, snapshot_id=snapshot_id)
        return answer

    # ---- for resuming ----------------------------------------------------------------------------------

    def find_snapshot(self, version: tuple[int, int], epoch: int) -> LocalSnapshot | None:
        """Return the complete snapshot of (generation, step) and epoch, or None; see `read_snapshot`."""
        for state in slot_memory.list_complete(self.control_block.read_slots()):
            if slot_memory.decode_snapshot_id(state.snapshot_id) == version:
                snapshot = self.read_snapshot(state)
                if snapshot is not None and snapshot.manifest.position.epoch == epoch:
                    return snapshot
        return None

    def read_snapshot(self, state: SlotState) -> LocalSnapshot | None:
        """Return the complete snapshot of a slot, None if the slot is gone.

        Raises:
            CheckpointError: the snapshot is damaged.

        """
        slot = self.map_slot(state.index, state.serial)
        if slot is None:
            return None
        manifest, image = slot.read_snapshot(state.snapshot_id)
        Layout.parse(image, len(image))
        return LocalSnapshot(slot, state.snapshot_id, manifest, image)

    def discard(self, index: int) -> None:
        """As local leader, make the slot's snapshot incomplete."""
        self.control_block.slot_record(index).set("snapshot_id", 0)

    def acquire_slot(self, manifest: Manifest) -> Slot | None:
        """Take a slot into which a restore can bring the image of ``manifest``; None if none is free.

        Only one slot is created now; creating the others would delay the transfer. Populate its pages before
        you write. It holds no snapshot until `finish_fill`.
        """
        needed = slot_memory.required_slot_bytes(manifest.file_bytes, *map(len, _encode_manifest(manifest)))
        if self.reserve(needed, is_estimate=True, all_now=False) == 0:
            return None
        # This never chooses the only snapshot: the source rank may die while it sends.
        state = slot_memory.choose_overwritable(
            [state for state in self.control_block.read_slots() if state.capacity >= needed]
        )
        slot = self.map_slot(state.index, state.serial) if state is not None else None
        if slot is None or not slot.take(slot_memory.encode_snapshot_id(*manifest.version)):
            return None
        slot.record.set("plan_id", 0)  # the image is about to be overwritten, with its header
        slot.watermark = 0
        return slot

    def populate(self, slot: Slot) -> None:
        """Map all pages of a slot; another thread may fill it meanwhile.

        Raises:
            MachineError: there is not enough memory.

        """
        slot.populate()
        self._populated.add((slot.index, slot.serial))

    def finish_fill(self, slot: Slot, manifest: Manifest, *, on_disk: bool) -> None:
        """Make the verified image in ``slot`` this node's snapshot; request its commit unless ``on_disk``."""
        snapshot_id = slot_memory.encode_snapshot_id(*manifest.version)
        static, dynamic = _encode_manifest(manifest)
        slot.write_metadata(b"", manifest.file_bytes, static, dynamic, secrets.randbits(63) | 1)
        slot.record.set_copied(0, snapshot_id)
        slot.record.set("loaded_id", snapshot_id if on_disk else 0)
        slot.announce(snapshot_id, commit_requested=not on_disk)
        if not on_disk:
            self._client.send("request_commit", snapshot_id=snapshot_id)

    def close(self) -> None:
        """Close the connection, and unmap the slots that nobody else uses: each mapping has a descriptor."""
        self._client.close()
        with self._lock:
            self._slots.clear()

    # ---- inside ----------------------------------------------------------------------------------------

    def _prepare(self, nbytes: int, is_estimate: bool) -> None:
        if self.is_local_leader:
            self.reserve(nbytes, is_estimate=is_estimate)
        with contextlib.suppress(CheckpointError, OSError):
            for state in self.control_block.read_slots():
                if state.capacity >= nbytes:
                    self._map_and_populate(state)

    def _map_and_populate(self, state: SlotState) -> None:
        key = (state.index, state.serial)
        if key in self._populated:
            return
        slot = self.map_slot(*key)
        if slot is not None:
            with contextlib.suppress(MachineError):  # the slot counts as not writable, and training goes on
                self.populate(slot)

    def _unmap_stale(self) -> None:
        existing = {(state.index, state.serial) for state in self.control_block.read_slots()}
        for key in self._slots.keys() - existing:
            self._populated.discard(key)
            del self._slots[key]


def _encode_manifest(manifest: Manifest) -> tuple[bytes, bytes]:
    static = {
        "run_id": manifest.run_id,
        "node": manifest.node,
        "rank": manifest.rank,
        "world_size": manifest.world_size,
        "writer": manifest.writer,
        "rank0_tensors": list(manifest.rank0_tensors),
        "state": manifest.state,
        "ways_back": encode_ways_back(manifest.ways_back),
    }
    dynamic = slot_memory.dynamic_metadata(manifest.generation, manifest.position, manifest.written_at, {})
    return slot_memory.encode_metadata(static), slot_memory.encode_metadata(dynamic)
