"""Connect workers to their node's committer over a unix socket.

A request is one line with a JSON object ``{"operation": ..., ...}``. Its answer, if it has one, is a line
too, with a file descriptor beside it where one was requested. The socket has an abstract name of 128 random
bits. Each side asks the kernel whether the other runs as the same user. One connection serves one worker.

    operation          arguments               answer
    hello                                      {} and the control block's descriptor
    slot               index serial            {"capacity"} and the slot's descriptor, or {"missing": true}
    reserve            bytes all               {"slots"}: how many there will be; `SlotPool.reserve`
    commit             snapshot_id             {"path"} or {"error"}, after the commit
    start_generation   floor trusted keep      none; the generation's `RetentionPolicy`
    request_commit     snapshot_id             none
    compare            snapshot_id world       none; compare the snapshot in that generation
    discard            index                   none; the slot's snapshot no longer counts
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from typing import Any

from elastic_resume.checkpoint.writer import RetentionPolicy
from elastic_resume.errors import ElasticResumeError, MachineError
from elastic_resume.snapshot.committer import CheckpointCommitter
from elastic_resume.snapshot.slots import MAX_SLOTS

MAX_MESSAGE_BYTES = 64 * 1024
MAX_CONNECTIONS = 2048  # two per local rank: a worker's and its successor's
MAX_COUNT = 1 << 53
ACCEPT_RETRY_S = 0.1
RESPONSE_TIMEOUT_S = 120.0  # allocating a large slot takes long


class SnapshotServer:
    """The committer's side: a thread per connection answers requests, from `start` to `close`."""

    def __init__(self, committer: CheckpointCommitter) -> None:
        self._committer = committer
        self._closing = False
        self.socket_name = f"elastic_resume-snapshots-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.socket_name)
        self._listener.listen(MAX_CONNECTIONS)
        self._connection_permits = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(
            target=self._accept, name="elastic-resume-snapshot-server", daemon=True
        )

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections; requests in progress are still answered."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(ACCEPT_RETRY_S)  # e.g. out of descriptors for a moment
                continue
            if not is_same_user(connection) or not self._connection_permits.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(
                    target=self._serve_connection,
                    args=(connection,),
                    name="elastic-resume-snapshot-connection",
                    daemon=True,
                ).start()
            except RuntimeError:  # the process may start no more threads
                connection.close()
                self._connection_permits.release()

    def _serve_connection(self, connection: socket.socket) -> None:
        try:
            with (
                connection,
                connection.makefile("rb") as lines,
                contextlib.suppress(OSError, ValueError, RecursionError),
            ):
                while request := lines.readline(MAX_MESSAGE_BYTES):
                    if not request.endswith(b"\n"):
                        return  # too long or cut off
                    answer, descriptor = self._handle_request(json.loads(request))
                    if answer is not None:
                        _send_response(connection, answer, descriptor)
        finally:
            self._connection_permits.release()

    def _handle_request(self, request: Any) -> tuple[dict[str, Any] | None, int | None]:
        """Execute a request; return the answer and a descriptor to pass.

        Raises:
            ValueError: the request is invalid.

        """
        if not isinstance(request, dict):
            raise ValueError("not a request")  # noqa: TRY004
        operation, pool = request.get("operation"), self._committer.slot_pool
        if operation == "hello":
            return {}, pool.control_descriptor
        if operation == "slot":
            index, serial = _parse_count(request, "index", MAX_SLOTS - 1), _parse_count(request, "serial")
            descriptor = pool.slot_descriptor(index, serial)
            if descriptor is None:
                return {"missing": True}, None
            return {"capacity": pool.control_block.slot_record(index).get("capacity")}, descriptor
        if operation == "reserve":
            count = pool.reserve(_parse_count(request, "bytes"), all_now=bool(request.get("all", True)))
            return {"slots": count}, None
        if operation == "commit":
            return self._handle_commit(_parse_snapshot_id(request)), None
        if operation == "start_generation":
            self._committer.start_generation(_parse_retention(request))
        elif operation == "request_commit":
            self._committer.request_commit(_parse_snapshot_id(request))
        elif operation == "compare":
            self._committer.request_comparison(_parse_snapshot_id(request), _parse_count(request, "world"))
        elif operation == "discard":
            pool.discard(_parse_count(request, "index", MAX_SLOTS - 1))
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
    """A worker's side; its threads may share it, but a fork must create its own."""

    def __init__(self, socket_name: str) -> None:
        """Connect to the committer's socket.

        Raises:
            ElasticResumeError: nothing answers there.

        """
        self._call_lock = threading.Lock()
        self._send_lock = threading.Lock()  # separate, so that `send` never waits for an answer to `call`
        self._socket_name = socket_name
        self._socket: socket.socket | None = None
        self._received = b""
        try:
            _, descriptor = self.call("hello", expect_descriptor=True)
        except OSError as error:
            self.close()
            raise ElasticResumeError(
                f"this node's snapshot server does not answer ({error}): has the agent ended, or does this "
                "worker run in another network namespace? --snapshot-memory off works without it."
            ) from error
        self.control_descriptor = descriptor

    def send(self, operation: str, **fields: Any) -> None:
        """Send a request without an answer; errors are ignored, because a dead committer ends its workers."""
        with contextlib.suppress(OSError), self._send_lock:
            self._ensure_connected().sendall(json.dumps({"operation": operation, **fields}).encode() + b"\n")

    def call(
        self,
        operation: str,
        *,
        expect_descriptor: bool = False,
        timeout_s: float | None = RESPONSE_TIMEOUT_S,
        **fields: Any,
    ) -> tuple[dict[str, Any], int]:
        """Send a request; return its answer and the descriptor that came with it, or -1.

        Raises:
            OSError: the committer exited, or did not answer within ``timeout_s``.

        """
        with self._call_lock:
            try:
                return self._send_and_receive(
                    {"operation": operation, **fields}, timeout_s, expect_descriptor=expect_descriptor
                )
            except OSError:
                # A late answer would be taken for the answer to the next request.
                with self._send_lock:
                    self._disconnect()
                raise

    def _send_and_receive(
        self, request: dict[str, Any], timeout_s: float | None, *, expect_descriptor: bool
    ) -> tuple[dict[str, Any], int]:
        with self._send_lock:
            connection = self._ensure_connected()
            connection.settimeout(timeout_s)
            connection.sendall(json.dumps(request).encode() + b"\n")
        descriptors: list[int] = []
        while b"\n" not in self._received:
            data, received, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
            descriptors += received
            self._received += data
            if not data or len(self._received) > MAX_MESSAGE_BYTES:
                raise OSError("the committer closed the connection")
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if expect_descriptor and not descriptors and not answer.get("missing"):
            raise OSError("the committer sent no descriptor")
        return answer, descriptors[0] if descriptors else -1

    def _ensure_connected(self) -> socket.socket:
        """Return the connection, reconnecting after a failure; hold ``_send_lock``."""
        if self._socket is None:
            self._socket, self._received = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), b""
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
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.control_descriptor)
            del self.control_descriptor


def is_same_user(connection: socket.socket) -> bool:
    """Whether the peer process runs as this user."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def _send_response(connection: socket.socket, response: dict[str, Any], descriptor: int | None) -> None:
    data = json.dumps(response).encode() + b"\n"
    if descriptor is None:
        connection.sendall(data)
    else:
        socket.send_fds(connection, [data], [descriptor])


def _parse_retention(request: dict[str, Any]) -> RetentionPolicy:
    trusted = request.get("trusted")
    if trusted is not None and not (
        isinstance(trusted, list) and len(trusted) == 2 and all(type(n) is int for n in trusted)
    ):
        raise ValueError("trusted")
    floor, keep = _parse_count(request, "floor", minimum=-1), _parse_count(request, "keep", minimum=2)
    return RetentionPolicy(floor, (trusted[0], trusted[1]) if trusted is not None else None, keep)


def _parse_snapshot_id(request: dict[str, Any]) -> int:
    return _parse_count(request, "snapshot_id", 1 << 64)


def _parse_count(request: dict[str, Any], name: str, maximum: int = MAX_COUNT, minimum: int = 0) -> int:
    value = request.get(name)
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"{name} is {value!r}")
    return value
