"""The report of a job that runs, as one process shows it again and again: read and told seldom, shown often.

It promises that telling it takes at most a tenth of this process's time, however long its logs are.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_resume.errors import ElasticResumeError
from elastic_resume.report import page, status_screen, story
from elastic_resume.report.gather import gather
from elastic_resume.report.markup import Markup, joined, lines, tag
from elastic_resume.report.story import Story

FRESH_S = 5.0
SHARE = 0.1
MAX_SCREEN = 20_000


class Report:
    """The report of the run that a node is part of."""

    def __init__(self, node_dir: Path, port: int) -> None:
        """Of all nodes that can be seen beside ``node_dir``, and what that one was told of others.

        ``port`` is that of these pages, and likely that of the leader's.
        """
        self._port = port
        self._run_dir = node_dir.parent
        self._told: Story | None = None
        self._until = -math.inf
        self._live_s = FRESH_S
        self._lock = threading.Lock()

    def page(self, said: Mapping[str, Any] | str) -> str:
        """Give the page, with how the job stands (or why that is not known) above the report."""
        told, live_s = self._tell()
        made = page.of(told, live_s=live_s)
        return made.replace("<body>", f"<body>\n{_now(said, self._port)}", 1)

    def parts(self) -> dict[str, float]:
        """Seconds by what the job's time went into; nothing where that cannot be told."""
        try:
            return dict(self._tell()[0].goodput.parts)
        except ElasticResumeError:
            return {}

    def _tell(self) -> tuple[Story, float]:
        with self._lock:
            began = time.monotonic()
            if self._told is None or began >= self._until:
                found = gather([self._run_dir])
                self._told = story.tell(
                    found.events,
                    items=found.items,
                    stacks=found.stacks,
                    problems=found.problems,
                    now=time.time(),
                )
                took = time.monotonic() - began
                self._live_s = max(FRESH_S, round(took / SHARE))
                self._until = began + took + self._live_s * (1 - SHARE)
            return self._told, self._live_s


def _now(said: Mapping[str, Any] | str, port: int) -> Markup:
    """How the job stands; on a node that does not lead also where to see more."""
    if isinstance(said, str):
        return tag("p", said)
    shown = tag("pre", lines("\n".join(status_screen.screen(said)), MAX_SCREEN), style="overflow-x:auto")
    leader = said["leader"]
    if said["leads"] or not leader:
        return shown
    host = str(leader["address"]).rpartition(":")[0]
    link = tag("a", f"its page, if it serves one at port {port}", href=f"http://{host}:{port}/")
    return joined([tag("p", f"{leader['node']} leads and knows of all nodes: ", link), shown])
