"""How workers reach their node's keeper: requests and answers, and descriptors of slots, over a unix socket.

A request is a JSON object on a line, ``{"ask": ..., ...}``; so is its answer, with a descriptor beside it
where one was asked for. The socket has an abstract name of 128 random bits, and each side asks the kernel
whether the other is the same user. One connection serves one worker::

    hello                       -> the control block
    slot index serial           -> that slot, and its capacity; {"gone": true} where it is no more
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

from elastic_resume.checkpoint.writer import Terms
from elastic_resume.errors import ElasticResumeError, MachineError
from elastic_resume.snapshot.committer import Keeper
from elastic_resume.snapshot.slots import MAX_SLOTS

MAX_LINE = 64 * 1024
MAX_CONNECTIONS = 2048  # two for each local rank at most: a worker's, and that of one that is being replaced
MAX_BYTES = 1 << 53
AGAIN_S = 0.1
ANSWER_S = 120.0  # to take memory for slots of the size of a large state; a commit may take longer


class Desk:
    """The keeper's side: answers workers, each in a thread of its own, from `open` to `close`."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._closing = False
        self.name = f"elastic_resume-keeper-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.name)
        self._listener.listen(MAX_CONNECTIONS)
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, name="elastic-resume-desk", daemon=True)

    def open(self) -> None:
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
                time.sleep(AGAIN_S)  # out of descriptors, say: workers that come later are to find us
                continue
            if not is_ours(line) or not self._places.acquire(blocking=False):
                line.close()
                continue
            try:
                threading.Thread(target=self._attend, args=(line,), name="desk", daemon=True).start()
            except RuntimeError:  # no more threads
                line.close()
                self._places.release()

    def _attend(self, line: socket.socket) -> None:
        try:
            with line, line.makefile("rb") as lines, contextlib.suppress(OSError, ValueError, RecursionError):
                while request := lines.readline(MAX_LINE):
                    if not request.endswith(b"\n"):
                        return  # longer than any of ours, or cut off
                    answer, descriptor = self._answer(json.loads(request))
                    if answer is not None:
                        _send(line, answer, descriptor)
        finally:
            self._places.release()

    def _answer(self, request: Any) -> tuple[dict[str, Any] | None, int | None]:
        """Do what is asked; give the answer and a descriptor to hand over. ValueError: nothing of ours."""
        if not isinstance(request, dict):
            raise ValueError("no request")  # noqa: TRY004
        ask, rack = request.get("ask"), self._keeper.rack
        if ask == "hello":
            return {}, rack.descriptor
        if ask == "slot":
            index, serial = _count(request, "index", MAX_SLOTS - 1), _count(request, "serial")
            descriptor = rack.descriptor_of(index, serial)
            if descriptor is None:
                return {"gone": True}, None
            return {"capacity": rack.control.record(index).get("capacity")}, descriptor
        if ask == "reserve":
            wanted = rack.reserve(_count(request, "bytes"), all_now=bool(request.get("all", True)))
            return {"slots": wanted}, None
        if ask == "commit":
            return self._commit(_count(request, "mark", 1 << 64)), None
        if ask == "enter":
            self._keeper.enter(_terms(request))
        elif ask == "wanted":
            self._keeper.wanted(_count(request, "mark", 1 << 64))
        elif ask == "compare":
            self._keeper.compare(_count(request, "mark", 1 << 64, least=1), _count(request, "world"))
        elif ask == "discard":
            rack.discard(_count(request, "index", MAX_SLOTS - 1))
        else:
            raise ValueError("no request")
        return None, None

    def _commit(self, mark: int) -> dict[str, Any]:
        try:
            path = self._keeper.commit(mark)
        except MachineError as error:
            return {"error": str(error)[: MAX_LINE // 4]}
        return {"path": str(path) if path is not None else None}


class Line:
    """A worker's side. Safe for any of its threads; a fork of it must make its own."""

    def __init__(self, name: str) -> None:
        """Connect to the keeper of that name.

        Raises:
            ElasticResumeError: nobody answers there.

        """
        self._asking = threading.Lock()
        self._sending = threading.Lock()  # of its own: who tells something does not wait for another's answer
        self._name = name
        self._socket: socket.socket | None = None
        self._heard = b""
        try:
            _, descriptor = self.ask("hello", wants_descriptor=True)
        except OSError as error:
            self.close()
            raise ElasticResumeError(
                f"the keeper of this node's snapshots does not answer ({error}): has the agent ended, or "
                "does this worker run in another network namespace? --snapshot-memory off does without it."
            ) from error
        self.control = descriptor

    def tell(self, ask: str, **fields: Any) -> None:
        """Send what needs no answer. Raises nothing: a keeper that is gone takes its workers with it."""
        with contextlib.suppress(OSError), self._sending:
            self._connected().sendall(json.dumps({"ask": ask, **fields}).encode() + b"\n")

    def ask(
        self, ask: str, *, wants_descriptor: bool = False, timeout_s: float | None = ANSWER_S, **fields: Any
    ) -> tuple[dict[str, Any], int]:
        """Send a request and wait for its answer; give it, and the descriptor that came along (or -1).

        Raises:
            OSError: the keeper is gone, or does not answer within ``timeout_s``.

        """
        with self._asking:
            try:
                return self._ask({"ask": ask, **fields}, timeout_s, wants_descriptor=wants_descriptor)
            except OSError:
                # What is still to come would be taken for the answer to the next request.
                with self._sending:
                    self._disconnect()
                raise

    def _ask(
        self, request: dict[str, Any], timeout_s: float | None, *, wants_descriptor: bool
    ) -> tuple[dict[str, Any], int]:
        with self._sending:
            line = self._connected()
            line.settimeout(timeout_s)
            line.sendall(json.dumps(request).encode() + b"\n")
        descriptors: list[int] = []
        while b"\n" not in self._heard:
            data, found, _, _ = socket.recv_fds(line, MAX_LINE, 1)
            descriptors += found
            self._heard += data
            if not data or len(self._heard) > MAX_LINE:
                raise OSError("the keeper is gone")
        told, _, self._heard = self._heard.partition(b"\n")
        answer = json.loads(told)
        if wants_descriptor and not descriptors and not answer.get("gone"):
            raise OSError("the keeper handed nothing over")
        return answer, descriptors[0] if descriptors else -1

    def _connected(self) -> socket.socket:
        """Give the connection, made anew where the last one has failed. Hold ``_sending``."""
        if self._socket is None:
            self._socket, self._heard = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), b""
            try:
                self._socket.connect("\0" + self._name)
                if not is_ours(self._socket):
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
        with self._sending:
            self._name = ""  # and make no other
            self._disconnect()
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.control)
            del self.control


def is_ours(line: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def _send(line: socket.socket, answer: dict[str, Any], descriptor: int | None) -> None:
    data = json.dumps(answer).encode() + b"\n"
    if descriptor is None:
        line.sendall(data)
    else:
        socket.send_fds(line, [data], [descriptor])


def _terms(request: dict[str, Any]) -> Terms:
    trusted = request.get("trusted")
    if trusted is not None and not (
        isinstance(trusted, list) and len(trusted) == 2 and all(type(n) is int for n in trusted)
    ):
        raise ValueError("trusted")
    floor, keep = _count(request, "floor", least=-1), _count(request, "keep", least=2)
    return Terms(floor, (trusted[0], trusted[1]) if trusted is not None else None, keep)


def _count(request: dict[str, Any], name: str, most: int = MAX_BYTES, least: int = 0) -> int:
    value = request.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}")
    return value
