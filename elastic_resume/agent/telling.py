"""Tells people how the job stands: this node's part to whoever leads, and all of it to those who look here.

A thread takes the node's pulse once a second, reads what is new in its event log, and hands both to the
rendezvous; what other nodes tell it writes into ``peers.jsonl``. Who looks gets a document made of that
(`document.py`). Where to look, and with which key, stands in ``look.json`` of the node's directory, for those
whom its file mode lets read it.
What befell the job before is asked of the disk when it begins (`recalling.py`).

Promise: neither the rendezvous nor training waits for anything here, and an error here costs them nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic_resume import contract
from elastic_resume.agent import document
from elastic_resume.agent.news import Peers, Picker, Tail, parsed
from elastic_resume.agent.pulse import Finger
from elastic_resume.agent.recalling import recall
from elastic_resume.events import Event
from elastic_resume.policy.tally import Tally
from elastic_resume.rendezvous.member import Member
from elastic_resume.rendezvous.steps import Heard
from elastic_resume.rendezvous.view import View

EVERY_S = 1.0
FRESH_S = 0.3
"""So long who looks gets the same document as the one before."""
CLOSE_S = 2.0
SLACK = 8
"""So far beyond the newest world that this agent knows of may be one that another tells of."""
MAX_HEARD_BYTES = 8 << 20
"""Of lines that wait to be written to a slow disk."""


class Teller:
    """The teller of one agent, from `start` to `close`."""

    def __init__(
        self,
        node_dir: Path,
        run_id: str,
        finger: Finger,
        tail: Tail,
        *,
        say: Callable[[str], None],
    ) -> None:
        """``finger`` takes the node's pulse, ``tail`` reads its events, ``say`` gets a line for people."""
        self._run_id = run_id
        self._node_dir = node_dir
        self._look_file = node_dir / contract.LOOK_FILE
        self._finger = finger
        self._say = say
        self._member: Member | None = None
        self._tail = tail
        self._picker = Picker()
        self._peers = Peers(node_dir / contract.PEERS_FILE)
        self._tally = Tally()
        self._nodes: dict[str, document.Known] = {}
        self._heard: deque[str] = deque()
        self._heard_bytes = 0
        self._newest = 0  # generation that the rendezvous knows of
        self._next: dict[str, int] = {}  # number of the line that each life of a node tells next
        self._missed = 0
        self._shown: tuple[float, bytes] = (float("-inf"), b"")
        self._said = ""
        self._lock = threading.Lock()  # of what the rendezvous' thread touches too: never held for long
        self._showing = threading.Lock()  # of the tally, and of what was shown last
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._live, name="elastic-resume-teller", daemon=True)

    def start(self, member: Member, key: bytes) -> None:
        """Tell and be told through ``member``; ``key`` lets people look."""
        self._member = member
        with contextlib.suppress(OSError):  # a disk that refuses is told of by who has to write to it
            _write_private(
                self._look_file,
                {
                    "run_id": self._run_id,
                    "address": member.address,
                    "endpoints": list(member.candidates),
                    "key": key.hex(),
                },
            )
        self._thread.start()

    def close(self) -> None:
        """End it; no later than `CLOSE_S` from now, though a disk hangs."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    # ---- the rendezvous' thread ----------------------------------------------------------------------

    def hear(self, heard: Heard) -> None:
        """Take in what another node tells."""
        node, life, tidings = heard.who.node, str(heard.who.life), heard.tidings
        with self._lock:
            if tidings.pulse is not None:
                self._nodes[node] = document.Known(tidings.pulse, time.monotonic())
            self._newest = max(self._newest, heard.newest)
            expected = self._next.get(life, tidings.first)  # a leader before this one may have heard the rest
            self._missed += max(0, tidings.first - expected)
            new = tidings.news[max(0, expected - tidings.first) :]
            self._next[life] = max(expected, tidings.first + len(tidings.news))
            self._heard.extend(new)
            self._heard_bytes += sum(map(len, new))
            while self._heard_bytes > MAX_HEARD_BYTES:
                self._heard_bytes -= len(self._heard.popleft())
                self._missed += 1

    # ---- those who look: a thread of the rendezvous ---------------------------------------------------

    def show(self, view: View) -> bytes:
        """Give the document for those who look; see `document.make`."""
        with self._showing:
            made_at, shown = self._shown
            if time.monotonic() < made_at + FRESH_S:
                return shown
            with self._lock:
                nodes, missed = dict(self._nodes), self._missed + self._peers.lost
            made = document.make(
                view,
                nodes,
                self._tally,
                run_id=self._run_id,
                missed=missed,
            )
            shown = json.dumps(made, separators=(",", ":")).encode()
            self._shown = (time.monotonic(), shown)
            return shown

    # ---- the thread ----------------------------------------------------------------------------------

    def _live(self) -> None:
        self._try(self._recall)
        ends = False
        while not ends:
            ends = self._closing.wait(EVERY_S)
            self._try(partial(self._turn, last=ends))
        with contextlib.suppress(OSError):
            self._look_file.unlink(missing_ok=True)

    def _try(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end what people are told
            if repr(error) != self._said:
                self._said = repr(error)
                self._say(f"status: a fault of elastic_resume itself: {error!r:.500}. Training goes on.")

    def _recall(self) -> None:
        """Begin with the incidents that are known here: before any new event, as they are taken in order."""
        tally = recall(self._node_dir, self._tail.began)
        with self._showing:
            self._tally = tally

    def _turn(self, *, last: bool) -> None:
        own = self._tail.read()
        with self._lock:
            heard, self._heard, self._heard_bytes = self._heard, deque(), 0
            newest = self._newest + SLACK
        told = list(parsed(heard))
        try:
            self._tell(own, [event for _, event in told], newest)
        finally:  # whatever it was, they are told once
            self._peers.append((line for line, _ in told), last=last)

    def _tell(self, own: list[tuple[str, Event]], heard: list[Event], newest: int) -> None:
        with self._showing:
            for _, event in own:
                self._tally.take(event)
            for event in heard:
                self._tally.take(event, newest)
            incidents = len(self._tally.incidents())
        for _, event in own:
            self._finger.note(event)
        pulse = self._finger.take(incidents)
        member = self._member
        if member is not None:
            with self._lock:
                self._nodes[member.node] = document.Known(pulse, time.monotonic())
            member.tell_people(pulse, [line for line, event in own if self._picker.wants(event)])


def _write_private(path: Path, said: dict[str, object]) -> None:
    """Write a small file that nobody else may read, the one that stands there included."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write(json.dumps(said) + "\n")
