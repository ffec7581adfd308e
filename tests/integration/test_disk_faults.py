"""A job trains on while its nodes' disks fill up, fail, are slow, turn read-only and lose their power."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_resume.report import summary
from elastic_resume.report.loader import load_run
from elastic_resume.testing import fork_server
from tests.support.machine_cluster import MachineCluster
from tests.support.rendezvous_nodes import count_open_descriptors, wait_until
from tests.support.training_job import SCRIPT, check_end

pytestmark = pytest.mark.cluster

EPOCHS = 10  # of ten steps
AHEAD = 6  # steps that a disk which does not work does not hold up


def newest_step(cluster: MachineCluster) -> int:
    """The newest step that any node has told of."""
    return max(int(event["step"]) for event in cluster.events("step"))


def befall(
    cluster: MachineCluster, index: int, wrong: Callable[[], object], right: Callable[[], object]
) -> None:
    """Let a disk go wrong, train on, put it right, and see that it takes a checkpoint again."""
    wrong()
    cluster.wait(step=newest_step(cluster) + AHEAD)
    right()
    cluster.wait(commit=newest_step(cluster) + 1, node=index)


def open_files() -> int:
    """How many descriptors this process has, but for those that it keeps for the next cluster."""
    gc.collect()  # what a test before this one has left
    return count_open_descriptors() - len(fork_server._servers)


def open_targets() -> list[str]:
    """List what the descriptors of this process point to."""
    return sorted(str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_no_disk_that_goes_wrong_costs_a_step(tmp_path: Path) -> None:
    """It is said once, with what to do, and once more when it is over; the report names node and cause."""
    flags = ["--save-every", "0.2s", "--snapshot-every", "1"]
    held = open_files()
    with MachineCluster(tmp_path, nodes=3, min_nodes=2, flags=flags) as cluster:
        kept = tmp_path / "diary"
        over = tmp_path / "over"  # until then the job does not come to its end
        words = ["--step-delay", "0.05", "--slow-from", "60", "--slow-until", str(over)]
        cluster.start(SCRIPT, "--diary", str(kept), "--epochs", str(EPOCHS), *words)
        cluster.wait(commit=3, node=0)
        befall(cluster, 0, lambda: cluster.fill_disk(0), lambda: cluster.free_disk(0))
        befall(cluster, 1, lambda: cluster.break_disk(1), lambda: cluster.mend_disk(1))
        befall(cluster, 2, lambda: cluster.limit_disk_rate(2, 20_000), lambda: cluster.limit_disk_rate(2, 0))
        befall(cluster, 2, lambda: cluster.turn_disk_read_only(2), lambda: cluster.mend_disk(2))
        assert {event["generation"] for event in cluster.events("step")} == {1}  # nobody was held up for long
        there = {entry.version for entry in cluster.checkpoints(2)}
        cluster.poweroff(2)
        assert there & {entry.version for entry in cluster.checkpoints(2)}  # what had been synced is there
        cluster.start_node(2)
        cluster.wait(step=1, generation=2, node=2)
        over.touch()
        assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
        assert cluster.lost_steps == 0
        check_end(kept, world_size=3, epochs=EPOCHS)
        told = summary.format_text(summary.build_run_report(load_run([cluster.run_dir]).events)).replace(
            "\n  ", " "
        )
        # Where the kernel's own writing meets the error first, ext4 is read-only by the time of a commit.
        failing = "(?:Input/output error|Read-only file system)"
        for index, reason in enumerate(["No space left", failing, "Read-only file system"]):
            said = cluster.output(index)
            assert len(re.findall(rf"was not saved: .*{reason}.*Training goes on", said)) == 1, said
            assert len(re.findall("checkpoints are saved again", said)) == 1, said
            assert re.search(rf"n{index}: the checkpoint could not be written: [^;]*{reason}", told), told
    # Seen once on a busy machine: one descriptor more for a moment. Cause unknown; a leak would stay.
    wait_until(lambda: open_files() <= held, f"at most {held} open files: {open_targets()}")
