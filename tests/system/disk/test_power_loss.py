"""The power goes, for real: on ext4 and xfs, at any moment of what a node does to its disk.

The file system is the kernel's; the drive below it loses what it was not told to flush, any part of it. Cuts
come at named points of the commit, before any operation on the disk, and at random microseconds, while
another process writes. `make soak` makes more of them; ELASTIC_RESUME_POWER_SEED chooses others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from elastic_resume.checkpoint import node_dir
from elastic_resume.checkpoint.catalog import MIN_KEEP, Catalog, read_quarantine_reason
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.constants import QUARANTINE_DIR, TEMPORARY_PREFIX
from elastic_resume.errors import NodeFileError
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from tests.support import disks
from tests.support.checkpoint_samples import RUN, save_checkpoint
from tests.support.disks import MIN_BYTES, FileSystem, SimulatedDisk
from tests.support.paths import ROOT
from tests.support.power_loss_writer import NODE

pytestmark = pytest.mark.slow

CUTS = int(os.environ.get("ELASTIC_RESUME_POWER_CUTS", "100"))
SEED = int(os.environ.get("ELASTIC_RESUME_POWER_SEED", "8"))
POINTS = ("before-data", "after-data", "before-manifest", "before-rename", "after-rename")
COMMIT_S = 0.01  # one takes 3 to 15 ms
OPERATIONS = 150  # that is four commits with all that is before and behind them


class Node:
    """A node's directory on a disk that loses its power, and what was promised about it."""

    def __init__(self, disk: SimulatedDisk, writer: subprocess.Popen[str]) -> None:
        """With a process that lives on it."""
        self.disk = disk
        self._writer = writer
        self._step = 1
        self._told: list[list[Any]] = []

    def cut(self, seed: int, behind: int | None = None, **asked: object) -> None:
        """Live until the power is cut: at the life's own end, or soon ``behind`` so many of its promises."""
        if self._writer.stdin is None or self._writer.stdout is None:
            raise RuntimeError("pipes were asked for")
        wanted = {"path": str(self.disk.path), "step": self._step, **asked}
        self._writer.stdin.write(json.dumps(wanted) + "\n")
        self._writer.stdin.flush()
        _, _, pid = json.loads(self._writer.stdout.readline())
        lines = iter(self._writer.stdout.readline, "\n")
        told: list[list[Any]] = []
        off_at = math.inf
        if behind is not None:
            told += map(json.loads, itertools.islice(lines, behind))
            time.sleep(Random(seed).random() * COMMIT_S)
            off_at = time.monotonic()
            self.disk.lose_power(seed)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        told += map(json.loads, lines)
        # A program without power says nothing; this one may, since xfs lets fsync of a directory that was
        # open when it shut down return as if all were well.
        self._told += [words for said_at, *words in told if said_at < off_at]
        if behind is None:
            self.disk.lose_power(seed)
        self.disk.mend()
        self._step += 100

    def broken(self) -> Iterator[str]:
        """What was promised and is not so, after the power is back."""
        path = self.disk.path / RUN / NODE
        catalog = Catalog(path, RUN)
        commits = sorted((rest[0], rest[1]) for word, *rest in self._told if word == "commit")
        quarantined = [rest[0] for word, *rest in self._told if word == "quarantine"]
        entries = [entry for entry in catalog.list_entries(read_data=True) if entry.generation]
        valid = [entry.version for entry in entries if entry.error is None]
        yield from (f"torn: {entry.error}" for entry in entries if entry.error is not None)
        for order in commits[-MIN_KEEP:]:
            # It may have pruned what newer ones replace, while we were about to cut its power.
            if order not in valid and sum(newer > order for newer in valid) < MIN_KEEP:
                yield f"{order} was committed and is lost"
        for entry in entries:
            if entry.manifest is not None and entry.manifest.state != {"step": entry.step}:
                yield f"{entry.path} is another's: {entry.manifest}"
        if missing := set(quarantined) - {each.name for each in catalog.list_quarantined()}:
            yield f"quarantine has lost {missing}"
        for name in quarantined[-1:]:
            if read_quarantine_reason(path / QUARANTINE_DIR / name) != "found bad":
                yield f"quarantine does not say why {name} is there"
        with NodeDir.claim(self.disk.path, RUN, NODE) as node:
            yield from self._broken_records(node, max(valid, default=(0, 0))[0])
            catalog.remove_unfinished()
            if left := [each.name for each in path.iterdir() if each.name.startswith(TEMPORARY_PREFIX)]:
                yield f"not swept: {left}"
            order = (node.read_generation(), self._step - 1)
            save_checkpoint(path, *order)
            # One whose power was cut between its rename and its telling is there, and counts as kept.
            self._told += [["commit", *each] for each in (*valid, order) if each not in commits]
            catalog.prune(MIN_KEEP)
            if order not in {entry.version for entry in catalog.list_valid()}:
                yield f"a new commit does not work: {order}"

    def _broken_records(self, node: NodeDir, generation: int) -> Iterator[str]:
        newest = {word: rest for word, *rest in self._told}
        if node.read_generation() < newest.get("generation", [0])[0]:
            yield f"generation {node.read_generation()} after {newest['generation']}"
        if (
            "life" in newest
            and node_dir.read_min_generation(node.path, "launcher_id", -1)[0] < newest["life"][0]
        ):
            yield f"life {node_dir.read_min_generation(node.path, 'supervisor', -1)} after {newest['life']}"
        memory = DurableStateFile(node.path).state
        if "record" in newest and (memory is None or memory.max_generation < newest["record"][0]):
            yield f"record {memory} after {newest['record']}"
        if node_dir.read_committed_generation(node.path) > generation:
            yield f"committed.json says {node_dir.read_committed_generation(node.path)}, the newest is of {generation}"


@contextlib.contextmanager
def node_on(kind: FileSystem, directory: Path) -> Iterator[Node]:
    """A node on a disk of this kind."""
    command = [sys.executable, "-m", "tests.support.power_loss_writer"]
    with (
        SimulatedDisk(directory, MIN_BYTES[kind], kind) as disk,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as writer,
    ):
        yield Node(disk, writer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_no_power_loss_tears_a_checkpoint_or_loses_what_was_committed(
    kind: FileSystem, tmp_path: Path
) -> None:
    """Nor what lies in quarantine, nor the greatest generation; and the next life commits again."""
    rng = Random(SEED)
    with node_on(kind, tmp_path) as node:
        for number in range(CUTS):
            seed = rng.randrange(1 << 30)
            match number % 4:
                case 0:
                    point = f"commit.{rng.choice(POINTS)}=kill@{rng.randint(1, 4)}"
                    node.cut(seed, failpoints=point)
                case 1:
                    node.cut(seed, operations=rng.randint(1, OPERATIONS))
                case _:
                    node.cut(seed, behind=rng.randint(3, 8))
            assert list(node.broken()) == [], f"cut {number} of seed {SEED}"


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize(
    ("without", "found"),
    [
        ("data", "torn: .*state.safetensors has"),
        ("manifest", "torn: .*manifest: ends after 0 bytes"),
        ("parent", "committed and is lost"),
        ("record", "identity.json: does not hold"),
    ],
)
def test_a_sync_that_is_left_out_is_found(
    kind: FileSystem, without: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked for above is seen where it is so: each fsync of a commit is needed, and one cut tells.

    But for that of the temporary directory: both file systems make its names durable along with the manifest.
    POSIX asks for it all the same, and the model in test_durable_crash.py misses it.
    """
    # By itself ext4 makes all durable every 5 s, for which this process may have to wait for a processor.
    monkeypatch.setitem(disks._MOUNT_OPTIONS, "ext4", {**disks._MOUNT_OPTIONS["ext4"], "commit": "300"})
    with node_on(kind, tmp_path) as node:
        node.cut(0, without=without, once=True)
        try:
            broken = "\n".join(node.broken())
        except NodeFileError as error:
            broken = str(error)
        assert re.search(found, broken)
