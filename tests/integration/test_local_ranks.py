"""Local ranks share the copying of snapshots, also if one of them is late or has another plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import launch_ranks

pytestmark = pytest.mark.slow

TRAIN = """
import json, sys, time, torch
import elastic_resume as er
from elastic_resume import failpoints
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.capture import schedule, slot_access, snapshot_plan, snapshotter
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import TensorBuffer
from tests.support import snapshot_samples
snapshot_plan.MIN_BYTES_TO_SPLIT = 0
for module in (slot_access, snapshotter, schedule):
    module.PEER_TIMEOUT_S = 60  # longer than any rank is delayed
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = er.resume(model=model, optimizer=optimizer, snapshot_every=1, save_every=2)
snapshots = run._generation.snapshot_scheduler.snapshotter
ddp, is_leader, results = run.ddp(model), run.rank == 0, {"problems": []}

def step():
    ddp(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()

def digest_model():
    return state_dict.digest_leaves(state_dict.flatten({"model": model}).leaves)

def read_newest():
    newest = snapshot_samples.read_newest(run._generation.slot_client)
    image = TensorBuffer(Layout.parse(newest.image, len(newest.image)), newest.image)
    leaves = [state_dict.Leaf(name, image.tensor(name), state_dict.OTHER) for name in image.layout.extents]
    return newest.manifest.step, state_dict.digest_leaves(leaves)

"""
PLAIN = """
for _ in range(4):
    step()
    run.step()
    snapshots.wait_for_copy()
    results["problems"].append(snapshots.problem)
"""
LATE_LEADER = """
if not is_leader:
    slot_access.PEER_TIMEOUT_S = snapshotter.PEER_TIMEOUT_S = 0.5
for number in range(1, 4):
    step()
    if is_leader and number == 3:
        time.sleep(1)  # such as an evaluation
    run.step()
if is_leader:
    results["finished"] = snapshots.wait_until_complete(20)
    results["step"] = read_newest()[0]
results["problem"] = snapshots.problem
run._generation.context.run_on_all_ranks(lambda: None)
"""
LATE_RANK = """
import pathlib
slot_access.PEER_TIMEOUT_S = snapshotter.PEER_TIMEOUT_S = 0.5
go = pathlib.Path(sys.argv[0]).with_name("go")

def until_go(name, *_):
    while name == "snapshot.copying" and not go.exists():
        time.sleep(0.01)

step()
if not is_leader:
    failpoints.hit = until_go
run.step()  # on rank 1 it waits for the copy
if is_leader:
    model[0].weight.data.add_(1)
    results["taken"] = snapshots.start_snapshot(run._generation.progress.finish_step(), leader_only=True)
    snapshots.wait_for_copy()
    go.touch()
run._generation.context.run_on_all_ranks(lambda: None)  # rank 1 has finished its copy
if is_leader:
    at, found = read_newest()
    results["whole"] = at == 1 or all(found[name] == one for name, one in digest_model().items())
run._generation.context.run_on_all_ranks(lambda: None)
"""
FROZEN_ON_LEADER = """
results["stale"] = []
for number in range(6):
    if number in {2, 3} and is_leader:  # only the local leader takes a snapshot of a frozen model
        model[0].weight.requires_grad_(False)
        snapshots.start_snapshot(run.position, leader_only=True)
        snapshots.wait_for_copy()
        model[0].weight.requires_grad_(True)
    run._generation.context.run_on_all_ranks(lambda: None)
    step()
    want = digest_model()
    run.step()
    snapshots.wait_for_copy()
    run._generation.context.run_on_all_ranks(lambda: None)
    if is_leader:
        whole = snapshots.wait_until_complete()
        at, found = read_newest()
        results["problems"].append(whole)
        counts = whole and at == number + 1
        results["stale"] += [name for name, one in want.items() if counts and found[name] != one]
    run._generation.context.run_on_all_ranks(lambda: None)
"""
REPORT = """
print(json.dumps(results))
run._release()
"""


def run_two_ranks(path: Path, body: str, **more: str) -> list[dict[str, Any]]:
    """Run two ranks of one node; return each rank's results."""
    script = path / "train.py"
    script.write_text(TRAIN + body + REPORT)
    env = [
        {
            "LOCAL_RANK": str(rank),
            "ELASTIC_RESUME_NODE_NAME": "n",
            "ELASTIC_RESUME_CKPT_DIR": str(path),
            "ELASTIC_RESUME_RUN_ID": "job",
            **more,
        }
        for rank in range(2)
    ]
    ends = launch_ranks.run_ranks(2, script, env=env)
    assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]
    return [json.loads(end.stdout.splitlines()[-1]) for end in ends]


@pytest.mark.parametrize("memory", ["off", "75000"])
def test_ranks_do_not_wait_for_snapshots_without_memory(memory: str, tmp_path: Path) -> None:
    """The local leader announces that there is no snapshot: no slot, or one that only commits use."""
    _, other = run_two_ranks(tmp_path, PLAIN, ELASTIC_RESUME_SNAPSHOT_MEMORY=memory)
    assert other["problems"] == [""] * 4


def test_late_local_leader_gets_complete_snapshot(tmp_path: Path) -> None:
    """The other rank waits in its copy thread while training continues."""
    leader, _ = run_two_ranks(tmp_path, LATE_LEADER)
    assert (leader["finished"], leader["step"]) == (True, 3)


def test_ranks_wait_longer_for_late_local_leader_without_hooks(tmp_path: Path) -> None:
    """The copy is synchronous then, and the local leader may still evaluate."""
    leader, other = run_two_ranks(tmp_path, LATE_LEADER.replace("    step()", "    ddp(torch.randn(4, 8))"))
    assert (leader["finished"], leader["step"], other["problem"]) == (True, 3, "")


def test_ranks_with_different_plans_leave_no_tensor_out(tmp_path: Path) -> None:
    """The local leader sees a frozen parameter, so its share differs from those of the other rank."""
    leader, _ = run_two_ranks(tmp_path, FROZEN_ON_LEADER)
    assert leader["stale"] == []
    assert leader["problems"][-1], "in the end the local leader copies everything"


def test_slot_that_late_rank_writes_is_not_reused(tmp_path: Path) -> None:
    """The next snapshot is skipped instead of being overwritten later."""
    leader, _ = run_two_ranks(tmp_path, LATE_RANK)
    assert leader["whole"]
    assert not leader["taken"]
