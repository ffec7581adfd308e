"""The report of a job that runs, as one process shows it again and again: read and told seldom, shown often.

A thread tells it while somebody asks, at most a tenth of the time, however long its logs are; of long ones it
leaves steps out, so that memory stays bounded. Who asks gets the newest that there is, after a few seconds at
most.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_resume import events
from elastic_resume.errors import ElasticResumeError
from elastic_resume.report import page, status_screen, story
from elastic_resume.report.gather import gather
from elastic_resume.report.markup import Markup, joined, lines, tag
from elastic_resume.report.story import Story

FRESH_S = 5.0
SHARE = 0.1
WAIT_S = 3.0
"""So long a page waits for a report that is new."""
MOST_BYTES = 4 << 20
"""Of logs, beyond which steps are left out: about 100 MB of memory."""
MAX_SCREEN = 20_000


class Report:
    """The report of the run that a node is part of. Methods may be called in any thread."""

    def __init__(self, node_dir: Path, port: int) -> None:
        """Of all nodes that can be seen beside ``node_dir``, and what that one was told of others.

        ``port`` is that of these pages, and likely that of the leader's.
        """
        self._port = port
        self._run_dir = node_dir.parent
        self._told: Story | None = None
        self._why = "The report is being told."
        self._until = -math.inf
        """Until when what was told is new enough."""
        self._live_s = FRESH_S
        self._asked = threading.Event()
        self._change = threading.Condition()
        threading.Thread(target=self._live, name="elastic-resume-report", daemon=True).start()

    def page(self, said: Mapping[str, Any] | str) -> str:
        """Give the page, with how the job stands (or why that is not known) above the report."""
        self._asked.set()
        with self._change:
            self._change.wait_for(lambda: time.monotonic() < self._until, WAIT_S)
            told, why, live_s = self._told, self._why, self._live_s
        made = page.without(why, live_s) if told is None else page.of(told, live_s=live_s)
        return made.replace("<body>", f"<body>\n{_now(said, self._port)}", 1)

    def parts(self) -> dict[str, float]:
        """Seconds by what the job's time went into, as last told, without waiting; nothing before that."""
        told = self._told
        self._asked.set()
        return dict(told.goodput.parts) if told else {}

    def _live(self) -> None:
        """Tell it when somebody has asked, and rest."""
        while True:
            self._asked.wait()
            self._asked.clear()
            began = time.monotonic()
            told, why = self._tell()
            took = time.monotonic() - began
            with self._change:
                self._told, self._why = told or self._told, why
                self._live_s = max(FRESH_S, round(took / SHARE))
                rest_s = self._live_s * (1 - SHARE)
                self._until = time.monotonic() + rest_s
                self._change.notify_all()
            time.sleep(rest_s)

    def _tell(self) -> tuple[Story | None, str]:
        try:
            found = gather([self._run_dir], most_bytes=MOST_BYTES)
            told = story.tell(
                found.events,
                items=found.items,
                stacks=found.stacks,
                problems=found.problems,
                now=time.time(),
                stamp=events.stamp(),
            )
        except ElasticResumeError as error:
            return None, str(error)
        except MemoryError:
            return None, "The report takes more memory than this process may have: elastic-resume report."
        except Exception as error:  # noqa: BLE001 - a fault of ours is the visitor's to read, and not the end
            return None, f"A fault of elastic_resume: {error!r:.500}."
        return told, ""


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
