"""Pass this node's notices to the user's command, if there is one."""

from __future__ import annotations

import time

from elastic_resume.events import Event
from elastic_resume.grace import find_left_s
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart
from elastic_resume.mechanisms.on_event.command import CommandQueue
from elastic_resume.mechanisms.on_event.notices import NoticeMaker
from elastic_resume.slots.progress_page import read_own_records


class Notifier(AgentPart):
    """Observes from the agent's start to `finish`."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._queue = CommandQueue(context.settings["on_event"])
        self._maker = NoticeMaker(context.summarize_event)
        self._stopping_at: float | None = None

    def observe(self, event: Event) -> None:
        """Queue the event's notice."""
        if notice := self._maker.make(event):
            if notice["step"] is None:
                notice["step"] = self._find_newest_step()
            self._queue.put(notice)

    def _find_newest_step(self) -> int | None:
        """Return the newest step of this node's workers, which may have ended."""
        records = read_own_records(self._context.node_dir, self._context.local_world_size)
        return max((record.step for record in records), default=None)

    def begin_stop(self, cause: str) -> None:
        """Note a signal to stop: the last commands get no more than what is left of the grace."""
        del cause
        if self._stopping_at is None:
            self._stopping_at = time.monotonic()

    def finish(self) -> None:
        """Give the last commands a limited time."""
        self._queue.finish(find_left_s(self._stopping_at))
