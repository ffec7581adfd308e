"""How workers reach their node's keeper: requests and answers, and descriptors of slots, over a unix socket.

A request is a JSON object on a line, ``{"operation": ..., ...}``; so is its answer, with a descriptor beside it
where one was asked for. The socket has an abstract name of 128 random bits, and each side asks the kernel
whether the other is the same user. One connection serves one worker::

    hello                       -> the control block
    slot index serial           -> that slot, and its capacity; {"missing": true} where it is no more
    reserve bytes all           -> {"slots": n}: how many there will be; one is there, the rest made if "all"
    enter floor trusted keep    -> the terms of this generation
    wanted mark                 -> that snapshot is to be committed
    commit mark                 -> {"path": ...} or {"error": ...}, when it is done
    compare mark world          -> that snapshot is to be compared in the world of that generation
    discard index               -> what lies there counts no more

Does not know what lies in slots.
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
MAX_CONNECTIONS = 2048  # two for each local rank at most: a worker's, and that of one that is being replaced
MAX_COUNT = 1 << 53
ACCEPT_RETRY_S = 0.1
RESPONSE_TIMEOUT_S = 120.0  # to take memory for slots of the size of a large state; a commit may take longer


class SnapshotServer:
    """The keeper's side: answers workers, each in a thread of its own, from `open` to `close`."""

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
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Take no more requests. Those under way are answered as long as the keeper does."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(ACCEPT_RETRY_S)  # out of descriptors, say: workers that come later are to find us
                continue
            if not is_same_user(line) or not self._connection_permits.acquire(blocking=False):
                line.close()
                continue
            try:
                threading.Thread(
                    target=self._serve_connection,
                    args=(line,),
                    name="elastic-resume-snapshot-connection",
                    daemon=True,
                ).start()
            except RuntimeError:  # no more threads
                line.close()
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
                        return  # longer than any of ours, or cut off
                    answer, descriptor = self._handle_request(json.loads(request))
                    if answer is not None:
                        _send_response(connection, answer, descriptor)
        finally:
            self._connection_permits.release()

    def _handle_request(self, request: Any) -> tuple[dict[str, Any] | None, int | None]:
        """Do what is asked; give the answer and a descriptor to hand over. ValueError: nothing of ours."""
        if not isinstance(request, dict):
            raise ValueError("no request")  # noqa: TRY004
        ask, rack = request.get("operation"), self._committer.slot_pool
        if ask == "hello":
            return {}, rack.control_descriptor
        if ask == "slot":
            index, serial = _parse_count(request, "index", MAX_SLOTS - 1), _parse_count(request, "serial")
            descriptor = rack.slot_descriptor(index, serial)
            if descriptor is None:
                return {"missing": True}, None
            return {"capacity": rack.control_block.slot_record(index).get("capacity")}, descriptor
        if ask == "reserve":
            wanted = rack.reserve(_parse_count(request, "bytes"), all_now=bool(request.get("all", True)))
            return {"slots": wanted}, None
        if ask == "commit":
            return self._handle_commit(_parse_count(request, "snapshot_id", 1 << 64)), None
        if ask == "start_generation":
            self._committer.start_generation(_parse_retention(request))
        elif ask == "request_commit":
            self._committer.request_commit(_parse_count(request, "snapshot_id", 1 << 64))
        elif ask == "compare":
            self._committer.request_comparison(
                _parse_count(request, "snapshot_id", 1 << 64, minimum=1), _parse_count(request, "world")
            )
        elif ask == "discard":
            rack.discard(_parse_count(request, "index", MAX_SLOTS - 1))
        else:
            raise ValueError("no request")
        return None, None

    def _handle_commit(self, snapshot_id: int) -> dict[str, Any]:
        try:
            path = self._committer.commit(snapshot_id)
        except MachineError as error:
            return {"error": str(error)[: MAX_MESSAGE_BYTES // 4]}
        return {"path": str(path) if path is not None else None}


class SnapshotClient:
    """A worker's side. Safe for any of its threads; a fork of it must make its own."""

    def __init__(self, socket_name: str) -> None:
        """Connect to the keeper of that name.

        Raises:
            ElasticResumeError: nobody answers there.

        """
        self._call_lock = threading.Lock()
        self._send_lock = (
            threading.Lock()
        )  # of its own: who tells something does not wait for another's answer
        self._socket_name = socket_name
        self._socket: socket.socket | None = None
        self._received = b""
        try:
            _, descriptor = self.call("hello", expect_descriptor=True)
        except OSError as error:
            self.close()
            raise ElasticResumeError(
                f"the keeper of this node's snapshots does not answer ({error}): has the agent ended, or "
                "does this worker run in another network namespace? --snapshot-memory off does without it."
            ) from error
        self.control_descriptor = descriptor

    def send(self, operation: str, **fields: Any) -> None:
        """Send what needs no answer. Raises nothing: a keeper that is gone takes its workers with it."""
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
        """Send a request and wait for its answer; give it, and the descriptor that came along (or -1).

        Raises:
            OSError: the keeper is gone, or does not answer within ``timeout_s``.

        """
        with self._call_lock:
            try:
                return self._send_and_receive(
                    {"operation": operation, **fields}, timeout_s, expect_descriptor=expect_descriptor
                )
            except OSError:
                # What is still to come would be taken for the answer to the next request.
                with self._send_lock:
                    self._disconnect()
                raise

    def _send_and_receive(
        self, request: dict[str, Any], timeout_s: float | None, *, expect_descriptor: bool
    ) -> tuple[dict[str, Any], int]:
        with self._send_lock:
            line = self._ensure_connected()
            line.settimeout(timeout_s)
            line.sendall(json.dumps(request).encode() + b"\n")
        descriptors: list[int] = []
        while b"\n" not in self._received:
            data, found, _, _ = socket.recv_fds(line, MAX_MESSAGE_BYTES, 1)
            descriptors += found
            self._received += data
            if not data or len(self._received) > MAX_MESSAGE_BYTES:
                raise OSError("the keeper is gone")
        told, _, self._received = self._received.partition(b"\n")
        answer = json.loads(told)
        if expect_descriptor and not descriptors and not answer.get("missing"):
            raise OSError("the keeper handed nothing over")
        return answer, descriptors[0] if descriptors else -1

    def _ensure_connected(self) -> socket.socket:
        """Give the connection, made anew where the last one has failed. Hold ``_sending``."""
        if self._socket is None:
            self._socket, self._received = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), b""
            try:
                self._socket.connect("\0" + self._socket_name)
                if not is_same_user(self._socket):
                    raise OSError("another user answers")  # noqa: TRY301
            except OSError:
                self._disconnect()
                raise
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # whoever waits for an answer hears of it
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """End the connection."""
        with self._send_lock:
            self._socket_name = ""  # and make no other
            self._disconnect()
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.control_descriptor)
            del self.control_descriptor


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
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


def _parse_count(request: dict[str, Any], name: str, maximum: int = MAX_COUNT, minimum: int = 0) -> int:
    value = request.get(name)
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"{name} is {value!r}")
    return value
