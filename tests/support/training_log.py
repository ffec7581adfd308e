"""Read the files of tests/support/scripts/train.py."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


def samples_by_epoch(log_dir: Path) -> dict[int, Counter[int]]:
    """Count the reads of each sample in each epoch, without steps that were recomputed later.

    A step that several generations ran counts in the last of them: the others' results were lost.
    """
    lines = [json.loads(line) for path in log_dir.glob("g*.jsonl") for line in path.read_text().splitlines()]
    last: dict[int, int] = {}
    for line in lines:
        last[line["step"]] = max(last.get(line["step"], 0), line["generation"])
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for line in lines:
        if line["generation"] == last[line["step"]]:
            seen[line["epoch"]].update(line["indices"])
    return dict(seen)


def repeated_steps(log_dir: Path) -> int:
    """Count the steps that more than one generation began."""
    ran: dict[int, set[int]] = defaultdict(set)
    for path in log_dir.glob("g*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            ran[entry["step"]].add(entry["generation"])
    return sum(len(generations) - 1 for generations in ran.values())


def final_states(log_dir: Path) -> list[dict[str, Any]]:
    """Return the final state of each rank, by rank."""
    found = [json.loads(path.read_text()) for path in log_dir.glob("end-*.json")]
    return sorted(found, key=lambda end: end["rank"])
