"""Try the orders in which processes access a slot, with few preemptions, and with rules taken away.

Each actor is a thread that stops before each access of a shared word, and of a byte of a snapshot. Only one
runs at a time. There are two memory models. In one, others see a store at once. In the other, which shows
where a barrier is missing, they see it as late as total store order allows: when the storing thread reaches
a barrier, stores a byte of a snapshot, or ends. That thread itself sees it at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any, ClassVar

import pytest

from elastic_resume import shared_page
from elastic_resume.slots import slot_memory
from elastic_resume.slots.slot_memory import Slot, SlotRecord, SlotState, encode_snapshot_id
from elastic_resume.slots.slot_pool import SlotPool

pytestmark = pytest.mark.slow

BYTES = 4096
LEADER_BYTES, OTHER_BYTES = (0, 1, 2), (3, 4)  # bytes of a snapshot that the two local ranks write
OLD, NEW, NEXT = (encode_snapshot_id(1, step) for step in (1, 2, 3))
Actor = Callable[["SharedNode"], None]
Deviations = tuple[tuple[int, int], ...]  # (number of the access, actor that runs from there on)


def taken_lock() -> threading.Lock:
    """Return a lock that one thread releases and another acquires: a semaphore, but five times as fast."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Turns:
    """Lets one actor run at a time, from one access to the next."""

    def __init__(self, *, are_stores_late: bool) -> None:
        self.are_stores_late = are_stores_late
        self.paused = taken_lock()
        self.turn_by_thread: dict[int, threading.Lock] = {}
        self.failures: list[BaseException] = []

    def pause(self) -> None:
        """Wait for this actor's next turn; return at once in other threads."""
        turn = self.turn_by_thread.get(threading.get_ident())
        if turn is not None:
            self.paused.release()
            turn.acquire()

    @contextlib.contextmanager
    def without_pauses(self) -> Iterator[None]:
        """Let this actor run on within the context."""
        turn = self.turn_by_thread.pop(threading.get_ident(), None)
        yield
        if turn is not None:
            self.turn_by_thread[threading.get_ident()] = turn

    def run(self, node: SharedNode, actors: Sequence[Actor], deviations: Deviations) -> list[set[int]]:
        """Run the actors one after the other, with ``deviations``; return who could run at each access."""
        turns, alive = [taken_lock() for _ in actors], set(range(len(actors)))
        choices: list[set[int]] = []

        def act(index: int) -> None:
            self.turn_by_thread[threading.get_ident()] = turns[index]
            if self.are_stores_late:
                SteppedWords.unseen[threading.get_ident()] = []
            turns[index].acquire()
            try:
                actors[index](node)
            except BaseException as error:  # noqa: BLE001  raised below
                self.failures.append(error)
            SteppedWords.show_stores()
            SteppedWords.unseen.pop(threading.get_ident(), None)
            alive.discard(index)
            self.paused.release()

        threads = [threading.Thread(target=act, args=(index,), daemon=True) for index in range(len(actors))]
        for thread in threads:
            thread.start()
        preempting, current = dict(deviations), 0
        while alive:
            current = preempting.get(len(choices), current)
            current = current if current in alive else min(alive)
            choices.append(alive - {current})
            turns[current].release()
            assert self.paused.acquire(timeout=10), "an actor waits for a paused one"
            try:
                node.check()
            except AssertionError as error:
                self.failures.append(error)
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        return choices


class SteppedWords:
    """The words of the control block; an actor stops before it accesses one."""

    unseen: ClassVar[dict[int, list[tuple[Any, int, int]]]] = {}
    """For each actor whose stores others see late: those they do not see yet."""

    def __init__(self, words: Any, turns: Turns) -> None:
        self.words, self.turns = words, turns

    def __getitem__(self, index: Any) -> Any:
        self.turns.pause()
        own = {at: value for _, at, value in self.unseen.get(threading.get_ident(), ())}
        if isinstance(index, slice):
            return [own.get(at, self.words[at]) for at in range(*index.indices(len(self.words)))]
        return own.get(index, self.words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.turns.pause()
        if threading.get_ident() in self.unseen:
            self.unseen[threading.get_ident()].append((self.words, index, value))
        else:
            self.words[index] = value

    @classmethod
    def show_stores(cls) -> None:
        """Let all actors see what this one has stored, as a barrier does."""
        stores = cls.unseen.get(threading.get_ident(), [])
        for words, index, value in stores:
            words[index] = value
        stores.clear()


class SharedNode:
    """A pool with two slots, in which snapshot OLD is complete, and what actors do with it."""

    def __init__(self, *, are_stores_late: bool = False) -> None:
        self.turns = Turns(are_stores_late=are_stores_late)
        self.pool = SlotPool(
            8 * BYTES, measure_free_bytes=lambda: 2**30
        )  # to read it takes a third of the time
        self.control = self.pool.control_block
        self.words: Any = self.control._words
        self.control._words = SteppedWords(self.words, self.turns)
        self.pool._create_slots(BYTES, min_count=2)
        self.attempts: dict[int, int] = {}
        self.newest_complete = 0
        self.checked: object = None  # what `check` has seen last: most accesses change nothing
        self.before: list[SlotState] = []  # the slots before the last act of a scenario's preparation
        self.given_up: set[int] = set()  # snapshots that may be lost though they were complete
        self.write(OLD, share_count=1)

    def write(self, snapshot_id: int, *, share_count: int = 2, chosen: SlotState | None = None) -> None:
        """Write a snapshot as local leader, without the other rank's share."""
        chosen = chosen or slot_memory.choose_overwritable(self.read_slots())
        slot = self.map_slot(chosen) if chosen is not None else None
        if slot is None:
            return
        attempt = self.attempts[snapshot_id] = self.attempts.get(snapshot_id, 0) + 1
        if attempt > 1:  # the share of a late rank may have completed it just now
            self.given_up.add(snapshot_id)
        if not slot.take(snapshot_id) or self.control.is_copying([1], snapshot_id):
            return
        self.store(slot, LEADER_BYTES[:2], snapshot_id % 100 + attempt)  # read at the time of the attempt
        slot.announce(snapshot_id, share_count=share_count)
        places = LEADER_BYTES if share_count == 2 else LEADER_BYTES + OTHER_BYTES
        self.store(slot, places[2:], snapshot_id % 100)
        slot.record.set_copied(0, snapshot_id)

    def write_share(self, snapshot_id: int) -> None:
        """Copy the other local rank's share, if the local leader has announced the slot."""
        for state in self.read_slots():
            slot = self.map_slot(state) if state.snapshot_id == snapshot_id else None
            if slot is not None:
                self.store(slot, OTHER_BYTES, snapshot_id % 100)
                slot.record.set_copied(1, snapshot_id)

    def map_slot(self, state: SlotState) -> Slot | None:
        """Map a slot as a worker does, unless it has been replaced."""
        owned = self.pool._owned.get(state.index)  # without the lock, whose owner may be paused
        if owned is None or owned.slot.serial != state.serial:
            return None
        return Slot(owned.descriptor, state.capacity, state.serial, self.control.slot_record(state.index))

    def read_slots(self) -> list[SlotState]:
        """Read the slots' states at one moment: each word may change before a decision is carried out."""
        with self.turns.without_pauses():
            return self.control.read_slots()

    def store(self, slot: Slot, places: Sequence[int], value: int) -> None:
        """Store one byte after the other."""
        for place in places:
            self.turns.pause()
            SteppedWords.show_stores()  # stores become visible in program order
            slot.memory[place] = value

    def commit(self) -> None:
        """Read the newest snapshot as the committer does."""
        newest = slot_memory.newest_complete(self.read_slots())
        if newest is None:
            return
        with self.pool.pin(newest) as slot:
            data = []
            for place in LEADER_BYTES + OTHER_BYTES if slot is not None else ():
                self.turns.pause()
                data.append(slot.memory[place])  # type: ignore[union-attr]
            if slot is not None and slot.record.complete_snapshot_id() == newest.snapshot_id:
                self.assert_whole(newest.snapshot_id, data)

    def assert_whole(self, snapshot_id: int, data: Sequence[int]) -> None:
        """Check that all bytes are of that snapshot, and the first ones of a single attempt at it."""
        shares = [snapshot_id % 100] * 3
        assert list(data[2:]) == shares, (snapshot_id, data)
        assert data[0] == data[1], (snapshot_id, data)
        assert snapshot_id % 100 < data[0] <= snapshot_id % 100 + self.attempts[snapshot_id]

    def check(self) -> None:
        """Check that complete slots are whole, and that the newest snapshot is not lost."""
        memories = b"".join(bytes(owned.slot.memory[:5]) for owned in self.pool._owned.values())
        seen = (bytes(self.words), memories, frozenset(self.given_up))
        if seen == self.checked:
            return
        self.checked = seen
        complete = [state for state in self.read_slots() if state.complete]
        for state in complete:
            self.assert_whole(state.snapshot_id, bytes(self.pool._owned[state.index].slot.memory[:5]))
        ids = {state.snapshot_id for state in complete}
        assert max(ids, default=0) >= self.newest_complete, "a complete snapshot is lost"
        self.newest_complete = max(ids - self.given_up, default=0)


def fail_late_and_write_alone(node: SharedNode) -> None:
    """Copy this rank's own share, but wait too short for the other's, and then write NEW alone."""
    node.write(NEW)
    if not any(state.complete and state.snapshot_id == NEW for state in node.read_slots()):
        node.write(NEW, share_count=1)


def write_share_and_commit(node: SharedNode) -> None:
    """Copy the other rank's share, and commit what is complete then."""
    node.write_share(NEW)
    node.commit()


def write_discard_and_write(node: SharedNode) -> None:
    """Write NEW, find that it is damaged, and write NEXT."""
    node.write(NEW, share_count=1)
    for state in node.read_slots():
        if state.snapshot_id == NEW:
            node.given_up.add(NEW)
            node.control.slot_record(state.index).set("snapshot_id", 0)
    node.write(NEXT, share_count=1)


def replace_slots(node: SharedNode) -> None:
    """Replace slots by larger ones as the agent does, under the same numbers; then commit."""
    node.given_up.add(NEW)  # if it becomes complete while its slot is dropped
    node.pool.reserve(2 * BYTES)
    node.commit()


COMMIT = SharedNode.commit
LONGEST = "again because the other rank is late"  # half of the time of all
SCENARIOS: dict[str, tuple[int, Sequence[Actor]]] = {  # the number of preemptions, and the actors
    "the ranks write, the committer reads": (
        1, [COMMIT, lambda node: node.write(NEW), lambda node: node.write_share(NEW)],
    ),
    LONGEST: (2, [fail_late_and_write_alone, write_share_and_commit]),
    "discarded": (1, [write_discard_and_write, COMMIT]),
    "slots are replaced": (1, [replace_slots, lambda node: node.write(NEW, share_count=1)]),
}  # fmt: skip


def explore(
    preemptions: int, actors: Sequence[Actor], before: Sequence[Actor] = (), *, are_stores_late: bool = False
) -> Iterator[Deviations]:
    """Run the actors in each order, with fewest preemptions first; yield each schedule that has passed."""
    for order in permutations(actors):
        pending: list[Deviations] = [()]
        while pending:
            deviations = pending.pop(0)
            node = SharedNode(are_stores_late=are_stores_late)
            for act in before:
                node.before = node.read_slots()
                act(node)
            try:
                choices = node.turns.run(node, order, deviations)
            finally:
                node.pool.close()
            yield deviations
            first = deviations[-1][0] + 1 if deviations else 0
            if len(deviations) < preemptions:
                pending += [
                    (*deviations, (at, actor)) for at in range(first, len(choices)) for actor in choices[at]
                ]


@pytest.mark.parametrize(
    "scenario", [pytest.param(each, marks=pytest.mark.soak if each == LONGEST else ()) for each in SCENARIOS]
)
def test_every_interleaving_keeps_complete_snapshots_whole(scenario: str) -> None:
    """The newest is never lost."""
    assert sum(1 for _ in explore(*SCENARIOS[scenario])) > 50


def write_chosen_again(node: SharedNode) -> None:
    """Write NEW again, into the slot in which the other rank completes it after the choice."""
    node.write(NEW, share_count=1, chosen=next(state for state in node.before if state.snapshot_id == NEW))


def copy_late(node: SharedNode) -> None:
    """Copy the other rank's share of NEW, as `capture` does."""
    node.control.set_copying(1, NEW)
    node.write_share(NEW)
    node.control.set_copying(1, 0)


LATE_STORES: dict[str, tuple[int, Sequence[Actor], Sequence[Actor]]] = {  # also what happens before
    "a pinned snapshot is written again": (
        2, [COMMIT, write_chosen_again], [lambda node: node.write(NEW), lambda node: node.write_share(NEW)],
    ),
    "a rank copies into the next snapshot's slot": (
        1,
        [copy_late, lambda node: node.write(NEXT, share_count=1)],
        [lambda node: node.write(NEW), lambda node: node.given_up.add(NEW)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("has_barriers", [True, False])
@pytest.mark.parametrize("scenario", LATE_STORES)
def test_stores_seen_late_tear_no_snapshot_only_with_barriers(
    scenario: str, has_barriers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process stores one word, then loads another's: without a barrier both may load old values."""
    monkeypatch.setattr(shared_page, "barrier", SteppedWords.show_stores if has_barriers else lambda: None)
    with contextlib.nullcontext() if has_barriers else pytest.raises(AssertionError):
        assert sum(1 for _ in explore(*LATE_STORES[scenario], are_stores_late=True)) > 20


def take_without_clearing(slot: Slot, snapshot_id: int) -> bool:
    """Leave the local leader's own word of the attempt before."""
    slot.record.set("snapshot_id", 0)
    slot.record.set("written_serial", slot.serial)
    return snapshot_id not in {slot.record.get("pinned"), slot.record.get("soft_pinned")}


def take_pinned(slot: Slot, snapshot_id: int) -> bool:
    """Take a slot whose reader has pinned an earlier attempt at the same snapshot."""
    TAKE(slot, snapshot_id)
    return True


def discard_late(node: SharedNode) -> None:
    """Discard NEW, which lies in the second slot, in the agent when the worker's message arrives."""
    node.control.slot_record(1).set("snapshot_id", 0)


TAKE = Slot.take
MUTATIONS: list[tuple[str, Any, str, Any]] = [
    ("again because the other rank is late", Slot, "take", take_without_clearing),
    ("again because the other rank is late", Slot, "take", take_pinned),
    ("discarded", SharedNode, "commit", discard_late),
    ("slots are replaced", SlotRecord, "announced_id", lambda record: record.get("snapshot_id")),
]


@pytest.mark.parametrize(("scenario", "owner", "name", "broken"), MUTATIONS)
def test_broken_rule_is_found_by_some_interleaving(
    scenario: str, owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rule of the protocol is needed; a second writer of a word breaks it."""
    monkeypatch.setattr(owner, name, broken)
    preemptions, actors = SCENARIOS[scenario]
    actors = [broken if actor is COMMIT and name == "commit" else actor for actor in actors]
    with pytest.raises(AssertionError):
        list(explore(preemptions, actors))
