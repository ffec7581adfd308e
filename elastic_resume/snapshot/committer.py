"""The keeper: owns a node's slots and commits snapshots from them to disk, behind the back of training.

It lives in the node's agent; under plain torchrun or python in the worker that leads the node. Workers write
snapshots into its slots and say which ones they want on disk; one thread of low priority commits those,
digests on the way. A disk that fails costs checkpoints, never training: the failure is said at once and again
every minute, older copies stay whole, and the newest snapshot is tried again.

Promise: what it commits was whole, and was not written over while it was read. It never waits for a worker,
and none waits for it unless it asks to.

Does not know torch, nor how workers reach it (`handing`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from elastic_resume.checkpoint.atomic_io import DISK, Disk
from elastic_resume.checkpoint.reader import name_of
from elastic_resume.checkpoint.writer import Put, Shelf, Terms
from elastic_resume.errors import CorruptError, MachineError
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.slot_pool import Rack
from elastic_resume.snapshot.slots import SlotState, order_of

LOOK_S = 0.003  # while other local ranks still copy their shares of what is to be committed
PATIENCE_S = 30.0  # after which it is given up: they are gone, or blocked
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 60.0
SAY_AGAIN_S = 60.0
NICENESS = 5


@dataclass
class _Wish:
    """Somebody waits until a snapshot not older than ``mark`` (0: whatever is newest) is on disk."""

    mark: int
    until: float
    path: Path | None = None
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)


class Keeper:
    """The keeper of one node, from `start` to `close`."""

    def __init__(
        self,
        node_dir: Path,
        run_id: str,
        rack: Rack,
        *,
        say: Callable[[str], None],
        tell: Callable[..., Any],
        disk: Disk = DISK,
    ) -> None:
        """Keep for the node of that directory.

        Args:
            node_dir: where checkpoints go; claimed by this process.
            run_id: the job's.
            rack: the slots; closed with the keeper.
            say: gets lines for people.
            tell: gets events, by kind and fields.
            disk: what writes.

        """
        self.rack = rack
        # Has a snapshot (its mark) compared with other nodes' in the world of that generation.
        self.compare: Callable[[int, int], object] = lambda *_: None
        self._shelf = Shelf(node_dir, run_id, tell, disk)
        self._node_dir = node_dir
        self._say = say
        self._tell = tell
        self._saved: dict[int, Path] = {}  # the newest commit, by its mark
        self._wishes: list[_Wish] = []
        self._awaited: tuple[int, float] | None = None  # a mark that is not whole yet, and until when
        self._problem = ""
        self._to_prune = False
        self._said_at = self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._closing = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._live, name="elastic-resume-keeper", daemon=True)

    def start(self) -> None:
        """Begin to commit.

        The next workers will want slots of the size that the newest copy has: a third of the time in which
        they read it from a cold disk would go into taking that memory.
        """
        file_bytes, manifest_bytes = self._shelf.newest_bytes()
        # The manifest is longer than either part of a slot's metadata.
        expected = slots.room_for(file_bytes, manifest_bytes, manifest_bytes) if file_bytes else 0
        if expected:
            self.rack.expect(expected, tell=False)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why the last commit failed; empty while all is well."""
        return self._problem

    def enter(self, terms: Terms) -> None:
        """Workers have resumed, on these terms."""
        self._shelf.enter(terms)

    def wanted(self, mark: int) -> None:
        """A worker wants that snapshot on disk; it may not be whole yet."""
        with self._news:
            self._awaited = (mark, _now() + PATIENCE_S)
            self._news.notify()

    def commit(self, mark: int = 0, timeout_s: float | None = None) -> Path | None:
        """Wait until a snapshot not older than ``mark`` (0: the newest there is) is on disk; give its path.

        None where there is none, or it does not come within ``timeout_s``.

        Raises:
            MachineError: the disk refuses.

        """
        wish = _Wish(mark, _now() + PATIENCE_S)
        with self._news:
            if self._closing:
                return None
            self._wishes.append(wish)
            self._news.notify()
        limit = None if timeout_s is None else _now() + timeout_s
        while self._thread.is_alive() and (limit is None or _now() < limit):
            if wish.done.wait(1.0 if limit is None else max(0.0, min(1.0, limit - _now()))):
                break
        if wish.error:
            raise MachineError(wish.error)
        return wish.path

    def distrust(self, generation: int, step: int) -> None:
        """Let no copy of that generation count that is of a later step, in memory or on disk.

        Workers that live may go on making some: `between` takes those away.

        Raises:
            MachineError: the disk refuses.

        """
        try:
            self._shelf.distrust(generation, step)  # first: see `between`
        finally:
            self.rack.distrust(generation, step)
            self._saved = {}  # the newest may have been one of those

    def between(self) -> None:
        """Workers are gone: have their newest snapshot committed that is not distrusted. Waits for nothing.

        One that becomes distrusted later than here is taken away by `distrust`, as there are no more to come.
        """
        for generation, step in self._shelf.distrusted():
            self.rack.distrust(generation, step)
        with self._news:
            self._wishes.append(_Wish(0, _now()))
            self._news.notify()

    def close(self) -> None:
        """End the commit under way, and give all memory back."""
        with self._news:
            self._closing = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()
        self.rack.close()

    # ---- the thread ------------------------------------------------------------------------------------

    def _live(self) -> None:
        lower_priority()
        while not self._closing:
            with self._news:
                if not self._closing and not self._is_due():
                    self._news.wait(self._pause_s())
            try:
                self._say_again()
                self._serve()
                if self._to_prune:
                    self._to_prune = False
                    self._shelf.prune()
            except Exception as error:  # noqa: BLE001  a fault of ours must not end checkpoints in silence
                self._stumble(error)
        for wish in self._wishes:
            wish.done.set()

    def _stumble(self, error: Exception) -> None:
        """Say what went wrong; let go of what it went wrong with."""
        with contextlib.suppress(Exception):
            self._tell("keeper-failed", error=repr(error)[:1000])
            self._say(f"checkpoints: a fault of elastic_resume itself: {error!r}. Training goes on.")
        for wish in self._wishes:
            wish.error = repr(error)
            wish.done.set()
        self._wishes = []
        for state in self.rack.control.states():
            self._settle(state)

    def _is_due(self) -> bool:
        states = self.rack.control.states()
        return bool(self._wishes) or slots.to_commit(states) is not None or 0 < self._retry_at <= _now()

    def _pause_s(self) -> float | None:
        if self._awaited is not None:
            return LOOK_S
        if not self._problem:
            return None
        return max(0.01, min(self._retry_at - _now(), SAY_AGAIN_S)) if self._retry_at else SAY_AGAIN_S

    def _serve(self) -> None:
        """Commit what somebody waits for, what is wanted, or what has failed before."""
        states = self.rack.control.states()
        newest = slots.newest(states)
        wish = next((wish for wish in self._wishes if _can_be_granted(wish, newest)), None)
        if self._awaited is not None and (
            self._awaited[1] < _now() or any(s.whole and s.target >= self._awaited[0] for s in states)
        ):
            self._awaited = None
        if wish is not None:
            self._grant(wish, newest)
        elif (state := slots.to_commit(states)) is not None or 0 < self._retry_at <= _now():
            self._retry_at = 0.0  # a failure sets it anew
            with contextlib.suppress(MachineError):
                self._commit(state or newest)
        elif self._wishes:
            time.sleep(LOOK_S)

    def _grant(self, wish: _Wish, state: SlotState | None) -> None:
        try:
            wish.path = self._commit(state)
        except MachineError as error:
            wish.error = str(error)
        self._wishes.remove(wish)
        wish.done.set()

    def _commit(self, state: SlotState | None) -> Path | None:
        """Commit a slot, unless its snapshot is on disk; None where nothing counts there (any more)."""
        if state is None or not state.whole:
            self._retry_at = 0.0
            return None
        order = order_of(state.target)
        if any(not path.is_dir() for path in self._saved.values()):
            self._saved = {}  # a resume has set it aside, and has got the same step from elsewhere
        if any(saved > state.target for saved in self._saved):
            self._settle(state)  # of the two of an epoch's last step, say, which have one name on disk
            return next(iter(self._saved.values()))
        if state.target not in self._saved:
            try:
                with self.rack.held(state) as slot:
                    put = self._write(slot, state.target) if slot is not None else None
            except MachineError as error:
                self._fail(order[1], error)
                self._settle(state)
                raise
            except CorruptError as error:
                self._tell("snapshot-ignored", generation=order[0], step=order[1], reason=str(error))
                self._settle(state)
                return None
            if put is None:
                if not self._shelf.believes(order):
                    time.sleep(LOOK_S)  # what was sent in place of a distrusted one: `enter` comes at once
                return None  # or written over meanwhile: there is a newer one
            self._saved, self._to_prune = {state.target: put.path}, True
            if put.seconds:
                self.rack.control.note_commit(put.seconds, put.cpu_s)
            self._well(order[1])
        self._settle(state)
        return self._saved.get(state.target)

    def _settle(self, state: SlotState) -> None:
        """Let the slot go: its snapshot is on disk, or given up."""
        record = self.rack.control.record(state.index)
        if record.get("target") == state.target:
            record.set("saved", state.target)

    def _write(self, slot: slots.Slot, mark: int) -> Put | None:
        try:
            image = slot.image()
            manifest = slots.manifest_of(*slot.notes(), len(image))
        except ValueError as error:
            raise CorruptError(f"snapshot: {error}") from error
        if slot.record.counts() != mark:
            return None
        if manifest.order != order_of(mark):
            raise CorruptError(f"snapshot: its notes are of {manifest.order}, its mark of {order_of(mark)}")
        if self._shelf.holds(manifest.order, manifest.position):  # that is where it came from
            return Put(self._node_dir / name_of(*manifest.order), 0.0, 0.0)
        return self._shelf.put(manifest, [image], still=lambda: slot.record.counts() == mark)

    def _fail(self, step: int, error: MachineError) -> None:
        if not self._problem:  # else it is said again in a minute
            self._say(
                f"step {step} was not saved: {error} Training goes on; older checkpoints are "
                f"untouched. It is tried again every {LAST_RETRY_S:.0f} s at least."
            )
            self._said_at = _now()
        self._problem = str(error)
        self._retry_at = _now() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _well(self, step: int) -> None:
        if self._problem:
            self._say(f"checkpoints are saved again, step {step} just now.")
        self._problem, self._retry_at, self._retry_s = "", 0.0, FIRST_RETRY_S

    def _say_again(self) -> None:
        if self._problem and _now() - self._said_at >= SAY_AGAIN_S:
            self._said_at = _now()
            self._say(f"checkpoints are still not saved: {self._problem}")


def _now() -> float:
    return time.monotonic()


def _can_be_granted(wish: _Wish, newest: SlotState | None) -> bool:
    """Whether what is wished for is there, or has been waited for in vain."""
    there = newest is not None and newest.target >= wish.mark
    return not wish.mark or there or _now() >= wish.until


def lower_priority() -> None:
    """Let this thread's work wait for others', on processors and disks."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, psutil.Error):
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)  # Linux counts threads as processes here
        psutil.Process(thread).ionice(psutil.IOPRIO_CLASS_BE, 7)
