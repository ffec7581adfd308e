"""In-memory log of the events of this round that decide whether to restart.

Supervisors and workers of this node append to a memory file that the agent owns, so a failing disk cannot
lose these events. Each round starts with an empty file. The log on disk gets the same events, for people.
"""

from __future__ import annotations

import os

from elastic_resume import events
from elastic_resume.agent.workers.lease_page import create_anonymous_file


class RoundEvents:
    """The events of `events.ROUND_END_KINDS` on this node since the last `clear`."""

    def __init__(self) -> None:
        self._descriptor = create_anonymous_file("elastic_resume-round-events")
        # torchelastic passes no descriptors on, so supervisors and workers open this name.
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> list[events.Event]:
        """Return the events in the order in which they were appended."""
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        parsed = (events.parse_complete_line(line) for line in data.splitlines(keepends=True))
        return [event for event in parsed if event is not None]

    def clear(self) -> None:
        """Remove all events, for a new round."""
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Release the memory. Further calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
