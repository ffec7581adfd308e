"""Drains this node when it is told that it will be taken away (``--preemption-notice``).

A thread for each source looks until one of them has a notice. Then: an event, a line for people, and a drain
of this node alone (`ending`): it commits the newest step and leaves, the others go on.

Promise: at most one drain. A source that cannot be asked is told of once, and asked on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elastic_resume.cluster.asking import AskError
from elastic_resume.cluster.notices import Notice, Source

CLOSE_S = 0.5


@contextlib.contextmanager
def watched(
    sources: Sequence[Source],
    *,
    say: Callable[[str], None],
    tell: Callable[..., Any],
    drain: Callable[[], None],
) -> Iterator[None]:
    """Look at the sources within the context.

    Args:
        sources: of `cluster.notices.sources`.
        say: gets a line for people.
        tell: gets events, by kind and fields.
        drain: called once, in a thread, when there is a notice.

    """
    watch = Watch(sources, say=say, tell=tell, drain=drain)
    watch.start()
    try:
        yield
    finally:
        watch.close()


class Watch:
    """The sources of one agent, from `start` to `close`."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        say: Callable[[str], None],
        tell: Callable[..., Any],
        drain: Callable[[], None],
    ) -> None:
        """See `watched`."""
        self._say = say
        self._tell = tell
        self._drain = drain
        self._over = threading.Event()
        self._once = threading.Lock()
        self._threads = [
            threading.Thread(target=self._live, args=(one,), name=f"notice-{one.name[:20]}", daemon=True)
            for one in sources
        ]

    def start(self) -> None:
        """Begin to look."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Look no more. Who is being asked may take its time: that thread ends with the process."""
        self._over.set()
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _live(self, source: Source) -> None:
        told = False
        while not self._over.is_set():
            try:
                notice = source.look()
            except Exception as error:  # noqa: BLE001 - a thread that ends would never see the notice
                notice = None
                why = str(error) if isinstance(error, AskError) else repr(error)
                if not told:
                    told = True
                    self._say(f"--preemption-notice {source.name}: {why}. It is asked on; no more is said.")
            if notice is not None:
                self._heed(source, notice)
                return
            self._over.wait(source.period_s)

    def _heed(self, source: Source, notice: Notice) -> None:
        with self._once:
            if self._over.is_set():
                return
            self._over.set()
        left_s = None if notice.deadline is None else notice.deadline - time.time()
        when = "" if left_s is None else f", in {left_s:.0f} s"
        self._tell(
            "preemption-notice",
            source=source.name,
            reason=notice.reason,
            deadline=notice.deadline,
        )
        self._say(
            f"preemption notice ({source.name}): {notice.reason}{when}: "
            "this node commits its newest step and leaves."
        )
        self._drain()
