"""What befell a job before this agent's life, from what lies on its node's disk. Read once, when it begins.

The node's own log has what it saw in earlier lives; ``peers.jsonl`` what others told it while it led. So
whoever comes to lead counts incidents from the job's beginning, and not from its own.

Promise: of each file the newest `MOST_BYTES` are read, for `MOST_S` in all, and few of them are kept. What is
not read is not counted; nothing is counted that did not happen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from elastic_resume import contract
from elastic_resume.events import Event, count_of, parse
from elastic_resume.policy.tally import Tally

MOST_BYTES = 64 << 20
"""Most of a log are marks of steps, ten a second and rank at most: that is half a day of one rank."""
MOST_S = 2.0
_STEP = b'"event":"step"'


def recall(node_dir: Path, end: int, *, most_bytes: int = MOST_BYTES, most_s: float = MOST_S) -> Tally:
    """Give the incidents that the node's files tell of, of its log up to byte ``end``."""
    until = time.monotonic() + most_s
    tally, newest = Tally(), 0
    since = float("-inf") if end <= most_bytes else float("inf")
    for event in _events(node_dir / contract.EVENTS_FILE, end, most_bytes, until):
        since = min(since, event["t"])
        newest = max(newest, count_of(event, "generation") or 0)
        tally.take(event)
    for event in _events(node_dir / contract.PEERS_FILE, None, most_bytes, until):
        # Of a time of which its own log is not read, others' lines say too little of why worlds ended.
        if event["t"] >= since:
            tally.take(event, newest)
    return tally


def _events(path: Path, end: int | None, most_bytes: int, until: float) -> Iterator[Event]:
    """Give what a log tells up to byte ``end``; of the steps of a generation the first."""
    known = b""  # how a step of the generation that is read looks
    try:
        with open(path, "rb") as file:
            end = path.stat().st_size if end is None else end
            if end > most_bytes:
                file.seek(end - most_bytes)
                file.readline()
            place = file.tell()
            for line in file:
                place += len(line)
                if place > end or time.monotonic() > until:
                    return
                if known and _STEP in line and known in line:
                    continue
                event = parse(line)
                if event is not None:
                    yield event
                    if event["event"] == "step":
                        known = b'"generation":%d,' % (count_of(event, "generation") or 0)
    except OSError:
        return
