"""The training job of tests/support/scripts/train.py: its script, its logs, and the check of its end."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil

from elastic_resume import constants
from tests.support.paths import SCRIPTS
from tests.support.scripts.train import SAMPLES

SCRIPT = SCRIPTS / "train.py"
EPOCHS = 4


def check_end(kept: Path, *, world_size: int, epochs: int = EPOCHS, batch: int = 24) -> str:
    """Check that each epoch had every sample once and that all ranks end equal; return their digest."""
    every = dict.fromkeys(range(SAMPLES), 1)
    assert samples_by_epoch(kept) == dict.fromkeys(range(epochs), every)
    ends = [json.loads(path.read_text()) for path in kept.glob("end-*.json")]
    ends.sort(key=lambda end: end["rank"])
    assert [end["rank"] for end in ends] == list(range(world_size))
    assert {end["world_size"] for end in ends} == {world_size}
    assert {end["step"] for end in ends} == {epochs * SAMPLES // batch}
    assert len({end["digest"] for end in ends}) == 1
    return str(ends[0]["digest"])


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


def left_behind(directory: Path) -> Iterator[str]:
    """Yield the processes of a job whose agents are gone.

    They are found by the checkpoint directory in their environment, or by their open files: a forked process
    has its parent's environment, but its output is a file of its node.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            where = [process.environ().get(constants.ENV_CKPT_DIR, "")]
            where += [str(entry.readlink()) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
            is_its = process.pid != os.getpid() and any(Path(one).is_relative_to(directory) for one in where)
            if is_its and process.status() != psutil.STATUS_ZOMBIE:
                yield f"{process.pid} {' '.join(process.cmdline())[:80]}"
