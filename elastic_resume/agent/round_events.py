"""In-memory log of the events that decide whether to restart.

Guards and workers of this node append to a memory file that the agent owns. A failing disk cannot lose these
events. The next round clears the file. The log on disk gets the same events, for people.
"""

from __future__ import annotations

import os

from elastic_resume import events
from elastic_resume.agent.workers.lease_page import create_anonymous_file


class RoundEvents:
    """This node's `events.DECISIVE` events since the last `clear`."""

    def __init__(self) -> None:
        self._descriptor = create_anonymous_file("elastic_resume-round-events")
        # A name for guards and workers, to which torchelastic hands no descriptor on.
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> list[events.Event]:
        """Give them in the order in which they were appended."""
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        found = (events.parse_complete_line(line) for line in data.splitlines(keepends=True))
        return [event for event in found if event is not None]

    def clear(self) -> None:
        """Forget them: a round begins. Whoever appends from now on belongs to it."""
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Give the memory back. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
