"""Test real power losses on ext4 and xfs at any moment of a node's disk operations.

The file system is the kernel's. The simulated drive below it loses any part of its unflushed data.
Power is cut at named points of the commit, before any disk operation, and at random microseconds while
another process writes. `make soak` makes more cuts; ELASTIC_RESUME_POWER_SEED selects others.
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

CUTS = int(os.environ.get("ELASTIC_RESUME_POWER_CUTS", "50"))
SEED = int(os.environ.get("ELASTIC_RESUME_POWER_SEED", "8"))
POINTS = ("before-data", "after-data", "before-manifest", "before-rename", "after-rename")
COMMIT_S = 0.01  # a commit takes 3 to 15 ms
OPERATIONS = 150  # four commits and the operations around them


class Node:
    """A node's directory on a disk that loses its power, and the operations reported as durable there."""

    def __init__(self, disk: SimulatedDisk, writer: subprocess.Popen[str]) -> None:
        """Use ``writer``, a process of `power_loss_writer`."""
        self.disk = disk
        self._writer = writer
        self._step = 1
        self._reports: list[list[Any]] = []

    def cut(self, seed: int, after_reports: int | None = None, **options: object) -> None:
        """Run a life until the power is cut: at its own end, or soon after ``after_reports`` reports."""
        if self._writer.stdin is None or self._writer.stdout is None:
            raise RuntimeError("the writer has no pipes")
        request = {"path": str(self.disk.path), "step": self._step, **options}
        self._writer.stdin.write(json.dumps(request) + "\n")
        self._writer.stdin.flush()
        _, _, pid = json.loads(self._writer.stdout.readline())
        lines = iter(self._writer.stdout.readline, "\n")
        reports: list[list[Any]] = []
        off_at = math.inf
        if after_reports is not None:
            reports += map(json.loads, itertools.islice(lines, after_reports))
            time.sleep(Random(seed).random() * COMMIT_S)
            off_at = time.monotonic()
            self.disk.lose_power(seed)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reports += map(json.loads, lines)
        # Drop reports from after the cut: after a shutdown, xfs lets fsync of an open directory succeed.
        self._reports += [words for reported_at, *words in reports if reported_at < off_at]
        if after_reports is None:
            self.disk.lose_power(seed)
        self.disk.mend()
        self._step += 100

    def broken(self) -> Iterator[str]:
        """Describe each reported operation that is not durable after the power is back."""
        path = self.disk.path / RUN / NODE
        catalog = Catalog(path, RUN)
        commits = sorted((rest[0], rest[1]) for word, *rest in self._reports if word == "commit")
        quarantined = [rest[0] for word, *rest in self._reports if word == "quarantine"]
        entries = [entry for entry in catalog.list_entries(read_data=True) if entry.generation]
        valid = [entry.version for entry in entries if entry.error is None]
        yield from (f"torn: {entry.error}" for entry in entries if entry.error is not None)
        for order in commits[-MIN_KEEP:]:
            # The node may have pruned it just before the cut, if two newer ones exist.
            if order not in valid and sum(newer > order for newer in valid) < MIN_KEEP:
                yield f"{order} was committed and is lost"
        for entry in entries:
            if entry.manifest is not None and entry.manifest.state != {"step": entry.step}:
                yield f"{entry.path} holds another step: {entry.manifest}"
        if missing := set(quarantined) - {entry.name for entry in catalog.list_quarantined()}:
            yield f"quarantine has lost {missing}"
        for name in quarantined[-1:]:
            if read_quarantine_reason(path / QUARANTINE_DIR / name) != "found bad":
                yield f"quarantine does not say why {name} is there"
        with NodeDir.claim(self.disk.path, RUN, NODE) as node:
            yield from self._broken_records(node, max(valid, default=(0, 0))[0])
            catalog.remove_unfinished()
            if left := [entry.name for entry in path.iterdir() if entry.name.startswith(TEMPORARY_PREFIX)]:
                yield f"not removed: {left}"
            order = (node.read_generation(), self._step - 1)
            save_checkpoint(path, *order)
            # A cut between rename and report leaves a checkpoint that counts as kept.
            self._reports += [["commit", *version] for version in (*valid, order) if version not in commits]
            catalog.prune(MIN_KEEP)
            if order not in {entry.version for entry in catalog.list_valid()}:
                yield f"a new commit does not work: {order}"

    def _broken_records(self, node: NodeDir, generation: int) -> Iterator[str]:
        newest = {word: rest for word, *rest in self._reports}
        if node.read_generation() < newest.get("generation", [0])[0]:
            yield f"generation {node.read_generation()} after {newest['generation']}"
        state = DurableStateFile(node.path).state
        if "record" in newest and (state is None or state.max_generation < newest["record"][0]):
            yield f"record {state} after {newest['record']}"
        committed = node_dir.read_committed_generation(node.path)
        if committed > generation:
            yield f"committed.json says {committed}, the newest checkpoint is of {generation}"


@contextlib.contextmanager
def node_on(kind: FileSystem, directory: Path) -> Iterator[Node]:
    """Yield a node on a disk of this kind."""
    command, pipe = [sys.executable, "-m", "tests.support.power_loss_writer"], subprocess.PIPE
    with (
        SimulatedDisk(directory, MIN_BYTES[kind], kind) as disk,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as writer,
    ):
        yield Node(disk, writer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=pytest.mark.soak)])
def test_power_loss_keeps_committed_checkpoints_whole(kind: FileSystem, tmp_path: Path) -> None:
    """Quarantine and the greatest generation survive too, and the next life commits again."""
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
                    node.cut(seed, after_reports=rng.randint(3, 8))
            assert list(node.broken()) == [], f"cut {number} of seed {SEED}"


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize(
    ("without", "found"),
    [
        ("data", "torn: .*state.safetensors has"),
        ("manifest", "torn: .*manifest: ends after 0 bytes"),
        ("parent", "committed and is lost"),
        ("record", "identity.json: is damaged"),
    ],
)
def test_checker_finds_each_missing_sync(
    kind: FileSystem, without: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fsync of a commit is necessary, and one cut shows it.

    The temporary directory's is not tested: both file systems make its names durable along with the manifest.
    POSIX requires it all the same, and the model in test_atomic_io.py finds it missing.
    """
    # By default ext4 commits every 5 s, which would hide a missing fsync on a busy machine.
    monkeypatch.setitem(disks._MOUNT_OPTIONS, "ext4", {**disks._MOUNT_OPTIONS["ext4"], "commit": "300"})
    with node_on(kind, tmp_path) as node:
        node.cut(0, without=without, once=True)
        try:
            broken = "\n".join(node.broken())
        except NodeFileError as error:
            broken = str(error)
        assert re.search(found, broken)
