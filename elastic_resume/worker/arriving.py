"""An image whose bytes are still coming: each tensor can be had as soon as it is in place and verified.

One thread of one process fills the image and moves a watermark, a word that all ranks of the node may see
(`store/slots.py`); everybody else waits for the watermark before looking. So reading, sending and loading
overlap, and each byte is moved once.

Promise: what `tensor` and `bytes_of` give was verified by whoever filled it. Whoever waits hears of a filler
that fails, and never waits for one for longer than `LIMIT_S` without progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from elastic_resume.errors import CheckpointError, UnreadableError
from elastic_resume.store.layout import Layout, header_bytes
from elastic_resume.worker.image import Image

FAILED = (1 << 64) - 1
LIMIT_S = 1800.0  # as long as a collective may take: see `world.TIMEOUT`
_COPIERS = 2  # beside the thread that loads
_LOOK_S = 0.0005  # at the word of another process; a block of 16 MiB takes a disk some 8 ms


class PeerFailedError(UnreadableError):
    """Another rank could not give what this one needs; that rank tells why. Says nothing of a copy here."""


class Word(Protocol):
    """Where the watermark is kept: a slot, or a `Private` word."""

    arrived: int


class Private:
    """The word of an image that this process alone looks at."""

    def __init__(self, arrived: int = 0) -> None:
        self.arrived = arrived


class Arriving:
    """An image, the watermark below which it may be used, and what went wrong with filling it."""

    def __init__(self, memory: memoryview, word: Word) -> None:
        """``memory`` is exactly the image."""
        self.memory = memory
        self.error: BaseException | None = None
        self._word = word
        self._stopped = False
        self._image: Image | None = None
        self._news = threading.Condition()

    @classmethod
    def whole(cls, memory: memoryview) -> Arriving:
        """Give an image of which all has arrived."""
        return cls(memory, Private(len(memory)))

    # ---- for who fills it ------------------------------------------------------------------------------

    def advance(self, count: int) -> None:
        """Say that the first ``count`` bytes are in place and verified.

        Raises:
            PeerFailedError: nobody wants them any more.

        """
        if self._stopped:
            raise PeerFailedError("given up, since another node's copy failed")
        with self._news:
            self._word.arrived = count
            self._news.notify_all()

    def fail(self, error: BaseException) -> None:
        """Say that no more will come; who waits raises ``error``, in other processes a PeerFailedError."""
        with self._news:
            self.error = self.error or error
            self._word.arrived = FAILED
            self._news.notify_all()

    def stop(self) -> None:
        """Have the filler stop at its next block."""
        self._stopped = True

    # ---- for who uses it -------------------------------------------------------------------------------

    def arrived(self) -> int:
        """How many bytes may be used now. Raises what the filler met."""
        count = self._word.arrived
        if self.error is not None:
            raise self.error
        if count == FAILED:
            raise PeerFailedError("the rank that leads this node could not bring the state into its memory")
        return count

    def wait(self, count: int) -> None:
        """Return when the first ``count`` bytes may be used. Raises what the filler met."""
        here = self.arrived()
        until = time.monotonic() + LIMIT_S
        while here < count:
            with self._news:
                self._news.wait(_LOOK_S)
            before, here = here, self.arrived()
            if here > before:
                until = time.monotonic() + LIMIT_S
            elif time.monotonic() > until:
                raise PeerFailedError(f"no byte of the state arrived for {LIMIT_S:.0f} s, after {here} bytes")

    @property
    def layout(self) -> Layout:
        """What the header says; waits for it."""
        return self._whole_header().layout

    def tensor(self, name: str) -> Tensor:
        """Give the tensor ``name`` as a view, once it has arrived. Raises KeyError or the filler's error."""
        image = self._whole_header()
        self.wait(image.layout.extents[name].stop)
        return image.tensor(name)

    def look(self, name: str) -> Tensor:
        """Give the tensor ``name`` for its shape and dtype: its values may not be there yet."""
        return self._whole_header().tensor(name)

    def bytes_of(self, name: str) -> memoryview:
        """Give the bytes of the tensor ``name``, when they have arrived."""
        image = self._whole_header()
        self.wait(image.layout.extents[name].stop)
        return image.bytes_of(name)

    def _whole_header(self) -> Image:
        if self._image is None:
            self.wait(min(8, len(self.memory)))
            size = header_bytes(self.memory[:8], len(self.memory))
            self.wait(size)
            self._image = Image(Layout.parse(self.memory[:size], len(self.memory)), self.memory)
        return self._image


class Task:
    """A function that runs in a thread; what it raises is kept for `join`, and told to an image."""

    def __init__(self, name: str, action: Callable[[], object], image: Arriving | None = None) -> None:
        """Start it. ``image``: whose users have to hear of an error at once."""
        self.error: BaseException | None = None
        self._action = action
        self._image = image
        # A daemon: whoever waits for a peer that is gone must not keep this process from ending.
        self._thread = threading.Thread(target=self._run, name=f"elastic-resume-{name}", daemon=True)
        self._thread.start()

    def join(self) -> BaseException | None:
        """Wait for its end; give what it raised."""
        self._thread.join()
        return self.error

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001  raised by who joins
            self.error = error
            if self._image is not None:
                self._image.fail(error)


class Copies:
    """Copies of tensors for objects to keep, made in threads ahead of who asks for them, as they arrive.

    A copy is memory that is touched for the first time: 415 MB took 0.2 s, which is longer than everything
    else that a load from memory does. ``tensor`` gives a view, and waits for it.
    """

    def __init__(self, names: Iterable[str], tensor: Callable[[str], Tensor]) -> None:
        """Begin to copy the tensors ``names``, in that order."""
        self._tensor = tensor
        self._left = dict.fromkeys(names)
        self._making: set[str] = set()
        self._made: dict[str, Tensor] = {}
        self._error: BaseException | None = None
        self._news = threading.Condition()
        self._tasks = [Task("copy", self._copy) for _ in range(_COPIERS if self._left else 0)]

    def take(self, name: str) -> Tensor:
        """Give a copy of a tensor, which is the caller's. Raises what ``tensor`` does."""
        with self._news:
            self._left.pop(name, None)
            self._news.wait_for(lambda: name not in self._making or self._error is not None)
            if self._error is not None:
                raise self._error
            if name in self._made:
                return self._made.pop(name)
        return self._tensor(name).clone()

    def close(self) -> None:
        """Make no more of them."""
        with self._news:
            self._left.clear()
        for task in self._tasks:
            task.join()

    def _copy(self) -> None:
        while True:
            with self._news:
                name = next(iter(self._left), None)
                if name is None or self._error is not None:
                    return
                del self._left[name]
                self._making.add(name)
            try:
                made = self._tensor(name).clone()
            except BaseException as error:
                with self._news:
                    self._error = error
                    self._news.notify_all()
                raise
            with self._news:
                self._made[name] = made
                self._making.discard(name)
                self._news.notify_all()


def is_own(error: BaseException | None) -> bool:
    """Whether ``error`` says that this node's own copy cannot be loaded."""
    return isinstance(error, CheckpointError) and not isinstance(error, PeerFailedError)
