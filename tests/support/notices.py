"""What ranks have recorded of `run.preemption`, by `scripts/noticed.py` or `scripts/train.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any


def read_lines(directory: Path, prefix: str = "") -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the lines of each rank by (generation, rank)."""
    found = {}
    for path in directory.glob(f"{prefix}g*.jsonl"):
        generation, rank = map(int, re.findall(r"\d+", path.stem))
        found[generation, rank] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def find_first(directory: Path, generation: int = 1) -> dict[int, tuple[int, dict[str, Any]]]:
    """Return for each rank the step at which it first had a notice, and the notice."""
    found = {}
    for (number, rank), lines in read_lines(directory).items():
        noticed = [line for line in lines if line["preemption"]]
        if number == generation and noticed:
            found[rank] = noticed[0]["step"], noticed[0]["preemption"]
    return found


def check_same(
    directory: Path, generation: int, *, ranks: int, nodes: Collection[str], reason: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Check that all ranks had one notice at one step, of one of ``nodes``; return both."""
    first = find_first(directory, generation)
    assert first.keys() == set(range(ranks)), first
    assert len({json.dumps(each, sort_keys=True) for each in first.values()}) == 1, first
    step, notice = first[0]
    assert notice.keys() == {"reason", "node", "seconds"}
    assert notice["node"] in nodes, notice
    assert reason in {None, notice["reason"]}, notice
    return step, notice
