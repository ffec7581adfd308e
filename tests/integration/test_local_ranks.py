"""Local ranks that share the copying: whoever is late, no slot is spoilt, and nobody waits for nothing."""

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
from elastic_resume.capture import schedule, snapshotter
from elastic_resume.state import state_dict
from elastic_resume.state.tensor_buffer import TensorBuffer
snapshotter.MIN_BYTES_TO_SHARD = 0
snapshotter.PEER_TIMEOUT_S = schedule.PEER_TIMEOUT_S = 60  # longer than a rank may stand still
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = er.resume(model=model, optimizer=optimizer, snapshot_every=1, save_every=2)
snapshots = run._snapshot_scheduler.snapshotter
ddp, first, told = run.ddp(model), run.rank == 0, {"problems": []}

def step():
    ddp(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()

def now():
    return state_dict.digest_leaves(state_dict.flatten({"model": model}).leaves)

def held():
    newest = run._committer_connection.slot_client.find_newest()
    image = TensorBuffer(Layout.parse(newest.image, len(newest.image)), newest.image)
    leaves = [state_dict.Leaf(name, image.tensor(name), state_dict.OTHER) for name in image.layout.extents]
    return newest.manifest.step, state_dict.digest_leaves(leaves)

"""
PLAIN = """
for _ in range(4):
    step()
    run.step()
    snapshots.wait_for_copy()
    told["problems"].append(snapshots.problem)
"""
LAGGING = """
if not first:
    snapshotter.PEER_TIMEOUT_S = 0.5
for number in range(1, 4):
    step()
    if first and number == 3:
        time.sleep(1)  # an evaluation, say
    run.step()
if first:
    told["finished"] = snapshots.wait_until_complete(20)
    told["step"] = held()[0]
told["problem"] = snapshots.problem
run._context.run_on_all_ranks(lambda: None)
"""
BEHIND = """
import pathlib
snapshotter.PEER_TIMEOUT_S = 0.5
go = pathlib.Path(sys.argv[0]).with_name("go")

def until_go(name, *_):
    while name == "snapshot.copying" and not go.exists():
        time.sleep(0.01)

step()
if not first:
    failpoints.hit = until_go
run.step()
step()  # of rank 1 waits at the fence
if first:
    told["taken"] = snapshots.start_snapshot(run._progress.finish_step(), leader_only=True)
    snapshots.wait_for_copy()
    go.touch()
run._context.run_on_all_ranks(lambda: None)  # rank 1 has written what it had begun
if first:
    at, found = held()
    told["whole"] = at == 1 or all(found[name] == one for name, one in now().items())
run._context.run_on_all_ranks(lambda: None)
"""
FREEZING = """
told["stale"] = []
for number in range(6):
    if number in {2, 3} and first:  # the lead alone looks at a model that is frozen for an evaluation
        model[0].weight.requires_grad_(False)
        snapshots.start_snapshot(run.position, leader_only=True)
        snapshots.wait_for_copy()
        model[0].weight.requires_grad_(True)
    run._context.run_on_all_ranks(lambda: None)
    step()
    want = now()
    run.step()
    snapshots.wait_for_copy()
    run._context.run_on_all_ranks(lambda: None)
    if first:
        whole = snapshots.wait_until_complete()
        at, found = held()
        told["problems"].append(whole)
        counts = whole and at == number + 1
        told["stale"] += [name for name, one in want.items() if counts and found[name] != one]
    run._context.run_on_all_ranks(lambda: None)
"""
TELL = """
print(json.dumps(told))
run._release()
"""


def together(path: Path, body: str, **more: str) -> list[dict[str, Any]]:
    """Run two ranks of one node; give what each told."""
    script = path / "train.py"
    script.write_text(TRAIN + body + TELL)
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
    """The lead says that there are none, where there is no slot or only one, which is for the disk."""
    _, other = together(tmp_path, PLAIN, ELASTIC_RESUME_SNAPSHOT_MEMORY=memory)
    assert other["problems"] == [""] * 4


@pytest.mark.slow
def test_late_local_leader_gets_complete_snapshot(tmp_path: Path) -> None:
    """The others wait in a thread, for as long as training does not wait for them."""
    lead, _ = together(tmp_path, LAGGING)
    assert (lead["finished"], lead["step"]) == (True, 3)


@pytest.mark.slow
def test_ranks_wait_longer_for_late_local_leader_without_hooks(tmp_path: Path) -> None:
    """Training waits for such a copy at once: its patience would be over before the lead's evaluation."""
    lead, other = together(tmp_path, LAGGING.replace("    step()", "    ddp(torch.randn(4, 8))"))
    assert (lead["finished"], lead["step"], other["problem"]) == (True, 3, "")


def test_ranks_with_different_plans_leave_no_tensor_out(tmp_path: Path) -> None:
    """What the lead takes for frozen it copies itself, and the others' shares are others then."""
    lead, _ = together(tmp_path, FREEZING)
    assert lead["stale"] == []
    assert lead["problems"][-1], "the lead copies all by itself in the end"


@pytest.mark.slow
def test_slot_that_late_rank_writes_is_not_reused(tmp_path: Path) -> None:
    """The snapshot after it is given up rather than counted and then spoilt."""
    lead, _ = together(tmp_path, BEHIND)
    assert lead["whole"]
    assert not lead["taken"]
