"""Jobs with Hugging Face Accelerate: killed at every place of the loop, they end like the undisturbed job.

tests/support/scripts/accelerate_job.py is the job. Compared bit for bit are the samples of each micro-batch,
losses, learning rates, metrics, and at the end weights, optimizers, schedulers and tracked objects.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_resume.checkpoint.manifest import Position
from elastic_resume.errors import ConfigError, MismatchError
from elastic_resume.testing import Cluster, Fault, assert_same_run
from tests.support import launch_ranks
from tests.support.library_job import VALUES_FILE, read_values
from tests.support.paths import ROOT, SCRIPTS, preload

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SCRIPT, MISUSE, FOLDERS = (SCRIPTS / f"accelerate_{name}.py" for name in ("job", "misuse", "folders"))
BEFORE, EXAMPLE = (ROOT / "examples" / f"accelerate_digits{end}.py" for end in ("_before", ""))
FLAGS = ["--snapshot-every", "1", "--save-every", "1000"]
PRELOAD = preload("accelerate", "torch.distributed.fsdp")
SOAK = "ELASTIC_RESUME_SOAK_KILLS" in os.environ

# Place in the loop, step and rank of the worker that is killed there. The job evaluates in steps 4, 8, … and
# saves in steps 5, 10, …; epochs end with steps 7, 14 and 21.
KILLS = [
    ("begin", 2, 1),
    ("forward", 3, 0),
    ("evaluation", 4, 2),
    ("backward", 6, 1),
    ("epoch-end", 8, 0),
    ("save", 10, 1),
    ("stepped", 12, 2),
    ("logged", 14, 0),
    ("told", 17, 1),
]
DRAIN_STEP = 9
FEW = ("evaluation", "save", "logged")
VARIANTS: list[tuple[str, ...]] = [("accumulate",)]
if SOAK:
    VARIANTS = [
        (),
        ("accumulate", "bf16", "workers", "pair"),
        ("bf16",),
        ("workers",),
        ("pair",),
        ("sampler",),
        ("sampler", "workers"),
        ("max-steps", "accumulate"),
        ("stop",),
        *VARIANTS,
    ]

Records = dict[tuple[str, int, int], list[dict[str, Any]]]  # (kind, step, rank) -> records, by generation


def records_of(directory: Path) -> Records:
    """Read the records of all ranks."""
    found: Records = defaultdict(list)
    for path in sorted(directory.glob("g*-r*.jsonl")):
        rank = int(path.stem.rpartition("-r")[2])
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            found[entry.pop("kind"), entry["step"], rank].append(entry)
    return found


def ends_of(directory: Path) -> list[dict[str, Any]]:
    """Return the final state of each rank."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("end-*.json"))]


Undisturbed = Callable[[tuple[str, ...]], Path]


@pytest.fixture(scope="module")
def run_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return a function that runs the job without a launcher, once for the same options.

    It returns the directory of the records.
    """

    @functools.cache
    def run(options: tuple[str, ...]) -> Path:
        log = tmp_path_factory.mktemp("undisturbed")
        env = {"ELASTIC_RESUME_CKPT_DIR": str(log / "ckpt"), "ELASTIC_RESUME_SAVE_EVERY": "1000"}
        each = [{**env, "ELASTIC_RESUME_NODE_NAME": f"n{rank}"} for rank in range(3)]
        for done in launch_ranks.run_ranks(3, SCRIPT, str(log), *options, env=each):
            assert done.returncode == 0, done.stderr
        return log

    return run


def compare_values(disturbed: Path, whole: Path) -> None:
    """Check that the tracker has what rank 0 of the undisturbed job has recorded, at its steps."""
    expected: dict[int, dict[str, float]] = defaultdict(dict)
    for (kind, step, rank), (entry, *_) in records_of(whole).items():
        if rank == 0 and kind == "step":
            expected[step + 1] |= {"loss": float.fromhex(entry["losses"][-1]), "rate": entry["rates"][0][0]}
        elif rank == 0 and kind in {"evaluation", "epoch"}:
            at = step + (kind == "evaluation")
            expected[at][f"{kind}/loss"] = float.fromhex(entry["loss"])
    assert len(expected) > DRAIN_STEP
    assert read_values(disturbed.parent / VALUES_FILE) == expected


def compare(disturbed: Path, whole: Path, resumed: list[dict[str, Any]], ranks: int = 3) -> None:
    """Check that every record equals the undisturbed run's, those of repeated steps too.

    If a rank is stopped after a step's last all-reduce, the others may finish the step, and the job resumes
    after it. Then the stopped rank has no record of that step.
    """
    records, expected = records_of(disturbed), records_of(whole)
    assert records.keys() <= expected.keys()
    missing = defaultdict(set)
    for kind, step, rank in expected.keys() - records.keys():
        missing[step if kind == "epoch" else step + 1].add(rank)
    assert missing.keys() <= {event["step"] for event in resumed}, missing
    assert all(len(lacking) < ranks for lacking in missing.values()), missing
    for place, entries in records.items():
        (undisturbed,) = expected[place]
        assert entries == [undisturbed] * len(entries), place
    assert ends_of(disturbed) == ends_of(whole)
    assert len(ends_of(whole)) == ranks


@pytest.mark.parametrize("options", VARIANTS, ids="-".join)
def test_job_killed_at_every_place_equals_undisturbed_job(
    tmp_path: Path, run_undisturbed: Undisturbed, options: tuple[str, ...]
) -> None:
    """Kills of workers; a node is terminated and comes back, and in `make soak` another one is killed."""
    whole = run_undisturbed(options)
    last = ends_of(whole)[0]["step"]
    assert last < 21 or not {"max-steps", "stop"} & {*options}, "the job did not stop early"
    log = tmp_path / "log"
    log.mkdir()
    kills = [kill for kill in KILLS if kill[1] < last - 1 and (SOAK or kill[0] in FEW)]
    flags = [*FLAGS, "--log-metrics", f"csv:{tmp_path / VALUES_FILE}"]
    with Cluster(tmp_path, nodes=3, min_nodes=3, flags=flags) as cluster:

        def arm(chosen: list[tuple[str, int, int]]) -> list[str]:
            return [
                cluster.failpoints.arm(f"job.{place}=kill", step=step, rank=rank)
                for place, step, rank in chosen
            ]

        armed = arm([kill for kill in kills if kill[1] < DRAIN_STEP])
        hold_drain, hold_late_drain = (
            cluster.failpoints.arm("job.begin=wait", step=step, rank=0)
            for step in (DRAIN_STEP, DRAIN_STEP + 1)
        )
        if SOAK:
            hold_kill = cluster.failpoints.arm("job.forward=wait", step=5, rank=0)
        cluster.start(SCRIPT, str(log), *options)
        if SOAK:
            cluster.wait(lambda: cluster.failpoints.is_waiting(hold_kill), "step 5")
            cluster.kill_node(2)
            cluster.start_node(2)
        cluster.wait(lambda: cluster.failpoints.is_waiting(hold_drain), "the step of the drain")
        cluster.kill_agent(1, signal.SIGTERM)
        cluster.failpoints.release(hold_drain)  # the node leaves after this step, or after the next one
        assert cluster.wait_exit(only=[1]) == [128 + signal.SIGTERM]
        cluster.failpoints.release(hold_late_drain)
        armed += arm([kill for kill in kills if kill[1] > DRAIN_STEP])
        cluster.start_node(1)
        assert cluster.wait_exit() == [0, 0, 0], cluster.output_tails()
        resumed = cluster.events("resume")
        assert all(cluster.failpoints.read_fired(one) for one in armed)
    assert [event["generation"] for event in resumed] == list(range(1, len(kills) + 3 + SOAK))
    assert all(event["kind"] == "resumed" for event in resumed[1:])
    compare(log, whole, resumed)
    compare_values(log, whole)


@pytest.mark.soak
def test_sharded_job_survives_worker_and_node(tmp_path: Path) -> None:
    """FSDP2 by Accelerate on two nodes of two ranks: a worker dies, then a node, which comes back empty."""
    logs = [tmp_path / name / "log" for name in ("undisturbed", "killed")]
    for log in logs:
        log.mkdir(parents=True)
        settings: Any = {"nodes": 2, "min_nodes": 2, "workers_per_node": 2, "flags": FLAGS, "env": PRELOAD}
        with Cluster(log.parent, **settings) as cluster:
            if log.parent.name == "killed":
                killed = cluster.failpoints.arm("job.evaluation=kill", step=4, rank=1)
                hold = cluster.failpoints.arm("job.forward=wait", step=9, rank=0)
            cluster.start(SCRIPT, str(log), "sharded", "accumulate")
            if log.parent.name == "killed":
                cluster.wait(functools.partial(cluster.failpoints.is_waiting, hold), "step 9")
                assert cluster.failpoints.read_fired(killed)
                cluster.kill_node(1)
                cluster.start_node(1)
            assert cluster.wait_exit() == [0, 0], cluster.output_tails()
            resumed = cluster.events("resume")
            assert cluster.lost_steps == 0
    assert [event["kind"] for event in resumed[1:]] == ["resumed"] * 2
    compare(logs[1], logs[0], resumed, ranks=4)


def steps_of(log: Records) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield step, rank and the newest record of each step."""
    return ((step, rank, entries[-1]) for (kind, step, rank), entries in log.items() if kind == "step")


def read_samples(log: Records) -> dict[int, set[int]]:
    """Return the samples of each step over all ranks."""
    found: dict[int, set[int]] = defaultdict(set)
    for step, _, entry in steps_of(log):
        found[step].update(entry["read"])
    return found


@pytest.mark.soak  # test_end_to_end.py has the samples, a test below the global batch
def test_job_of_changing_size_reads_same_samples(tmp_path: Path, run_undisturbed: Undisturbed) -> None:
    """A node dies, two go on, and it comes back; each step has the samples of the undisturbed job."""
    whole = run_undisturbed(("accumulate",))
    log = tmp_path / "log"
    log.mkdir()
    with Cluster(tmp_path, nodes=3, min_nodes=2, flags=FLAGS) as cluster:
        arm, is_waiting = cluster.failpoints.arm, cluster.failpoints.is_waiting
        # All ranks, so that none lacks the record of a step that the others have finished.
        hold_kill = [arm("job.backward=wait", step=5, rank=rank) for rank in range(3)]
        hold_return = [arm("job.begin=wait", step=11, rank=rank) for rank in range(2)]
        cluster.start(SCRIPT, str(log), "accumulate")
        cluster.wait(lambda: all(map(is_waiting, hold_kill)), "step 5 of all ranks")
        cluster.kill_node(2)
        cluster.wait(lambda: all(map(is_waiting, hold_return)), "step 11 of both ranks")
        cluster.start_node(2)
        cluster.wait(generation=3)
        assert cluster.wait_exit() == [0, 0, 0], cluster.output_tails()
        sizes = [event["world_size"] for event in cluster.events("resume")]
    assert sizes == [3, 2, 3]
    samples = read_samples(records_of(log))
    assert samples == read_samples(records_of(whole))
    (before, *_), (after, *_) = (ends_of(whole), ends_of(log))
    assert after["step"] == before["step"]
    assert after["saved"] == before["saved"]
    # The scheduler stepped once per optimizer step, whatever the number of processes.
    rates = [{step: entry["rates"] for step, _, entry in steps_of(records_of(one))} for one in (log, whole)]
    assert rates[0] == rates[1]


EXPECTED = {
    "without cpu=True": "ConfigError: the accelerator counts 1 process and the job has 2",
    "prepared loader": "ConfigError: accelerator.prepare() was given the loader of the run",
    "dispatched loader": "ConfigError: accelerator.prepare() was given the loader of the run",
    "prepared by another accelerator": "UsageError: run.step() was called once per 2 batches",
    "accumulation without micro_batch": "ConfigError: the accelerator has gradient_accumulation_steps=4",
    "prepare(loader) afterwards": "UsageError: accelerator.prepare() was given the loader of the run",
    "skip_first_batches of own loader": "UsageError: accelerator.skip_first_batches() was given the loader",
    "load_state": "UsageError: accelerator.load_state() in the training would put an older state",
    "prepared own loader": "ConfigError: data= has been through accelerator.prepare(), which divides",
    "save_state on the main process": "no error",
    "register_for_checkpointing": "UsageError: accelerator.register_for_checkpointing() was called after",
    "plain backward": "UsageError: the optimizer's first step came without accelerator.backward(loss)",
    "backward without accumulate": "UsageError: accelerator.backward() was called outside of",
}


def test_each_misuse_ends_with_its_error(tmp_path: Path) -> None:
    """On both ranks; nothing is trained on a part of the samples."""
    env = {"ELASTIC_RESUME_CKPT_DIR": str(tmp_path)}
    each = [{**env, "ELASTIC_RESUME_NODE_NAME": f"n{rank}"} for rank in range(2)]
    for done in launch_ranks.run_ranks(2, MISUSE, "misuse", str(tmp_path / "project"), env=each):
        assert done.returncode == 0, done.stderr
        errors = dict(line.split(": ", 1) for line in done.stdout.splitlines())
        assert errors.keys() == EXPECTED.keys()
        for name, start in EXPECTED.items():
            assert errors[name].startswith(start), f"{name}: {errors[name]}"


@pytest.mark.soak
def test_main_process_saves_and_is_killed_within(tmp_path: Path) -> None:
    """The restarted script finds its own folders; its limit counts none of a step that is repeated."""
    ends = []
    for kills in ([], [("save", 9, 0), ("step", 13, 1)]):
        log = tmp_path / f"{len(kills)}-kills"
        log.mkdir()
        settings: Any = {"workers_per_node": 2, "flags": FLAGS, "env": PRELOAD}
        with Cluster(log / "nodes", nodes=1, **settings) as cluster:
            for place, step, rank in kills:
                name = place if place == "step" else f"job.{place}"
                cluster.failpoints.arm(f"{name}=kill", step=step, rank=rank)
            cluster.start(FOLDERS, str(log))
            assert cluster.wait_exit() == [0], cluster.output_tails()
            assert len(cluster.events("resume")) == 1 + len(kills)
        lines = [sorted({*path.read_text().splitlines()}) for path in sorted(log.glob("*.jsonl"))]
        weights = {path.parent.name: path.read_bytes() for path in log.glob("step_*/*.safetensors")}
        ends.append((lines, weights, sorted(path.name for path in log.iterdir())))
    assert ends[0][:2] == ends[1][:2]
    assert [len(lines) for lines in ends[0][0]] == [36 + 6, 36]
    assert sorted(ends[0][1]) == ["step_15", "step_18"]
    assert "lost-steps" not in ends[1][2]


def make_accelerator(**attributes: Any) -> Any:
    """Return what `prepare` reads of an accelerator."""
    from accelerate.utils import DistributedType  # noqa: PLC0415  seconds

    kinds = {
        "distributed_type": DistributedType.NO,
        "is_fsdp2": False,
        "parallelism_config": None,
        "num_processes": 1,
        "mixed_precision": "no",
        "ddp_handler": None,
        "gradient_accumulation_steps": 1,
        "_dataloaders": [],
        "project_configuration": SimpleNamespace(automatic_checkpoint_naming=False),
        "split_batches": False,
    }
    return SimpleNamespace(**{**kinds, **attributes})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        *[({"kind": kind}, f"uses {kind}") for kind in ("DEEPSPEED", "MEGATRON_LM", "XLA")],
        ({"kind": "FSDP"}, "uses FSDP1"),
        ({"degrees": {"tp_size": 2}}, "tp_size=2"),
        ({"degrees": {"cp_size": 2, "dp_shard_size": 2}, "kind": "FSDP", "is_fsdp2": True}, "cp_size=2"),
        ({"degrees": {"dp_replicate_size": 2, "dp_shard_size": 2}}, "only with an fsdp_plugin"),
        ({"mixed_precision": "fp8"}, "fp8"),
        ({"comm_hook": "POWER_SGD"}, "PowerSGD"),
    ],
)
def test_unsupported_accelerator_is_refused_by_name(attributes: dict[str, Any], message: str) -> None:
    """Before anything is prepared."""
    from accelerate import ParallelismConfig  # noqa: PLC0415  seconds
    from accelerate.utils import DDPCommunicationHookType, DistributedType  # noqa: PLC0415

    from elastic_resume.integrations.accelerate import prepare  # noqa: PLC0415  needs accelerate

    if "kind" in attributes:
        attributes = {**attributes, "distributed_type": DistributedType[attributes["kind"]]}
    if "degrees" in attributes:
        attributes = {**attributes, "parallelism_config": ParallelismConfig(**attributes["degrees"])}
    if "comm_hook" in attributes:
        hook = DDPCommunicationHookType[attributes["comm_hook"]]
        attributes = {"ddp_handler": SimpleNamespace(comm_hook=hook)}
    with pytest.raises(ConfigError, match=message):
        prepare(make_accelerator(**attributes), model=None, optimizer=None, data=None)


def make_batches(local_batch: int, processes: int) -> Any:
    """Return the batches of a script's own loader."""
    from elastic_resume.integrations.accelerate_loader import FirstWorldBatches  # noqa: PLC0415

    return FirstWorldBatches(40, local_batch, processes, seed=0)


def test_own_loader_keeps_the_global_batch_of_the_first_start() -> None:
    """In a world of any size. Another ``batch_size=`` in a restarted script is refused."""
    first = make_batches(4, 3)
    first.bind(0, 3)
    state, position = first.state_dict(), Position(0, 2, 2, 24)
    for processes in (2, 3, 5):
        later = make_batches(4, processes)
        later.bind(processes - 1, processes)
        later.load_state_dict(state)
        later.begin_generation(position, 3)
        assert (later.global_batch, later.first_processes, later.steps) == (12, 3, 4)
        assert later.state_dict() == state
    other = make_batches(6, 2)
    other.bind(0, 2)
    with pytest.raises(MismatchError, match="local_batch is 6 here, 4 in the checkpoint"):
        other.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:Detected call")
def test_own_loader_steps_a_schedule_once_per_process_of_the_first_start() -> None:
    """As a prepared scheduler does: not without an optimizer step, and not beyond its end."""
    import torch  # noqa: PLC0415  seconds, as the next
    from accelerate.scheduler import AcceleratedScheduler  # noqa: PLC0415

    from elastic_resume.integrations.accelerate_loader import step_per_process  # noqa: PLC0415

    optimizer: Any = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    optimizer.step()
    inner = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=8)
    state = SimpleNamespace(sync_gradients=True, adjust_scheduler=False)
    optimizer.step_was_skipped = False
    scheduler = AcceleratedScheduler(inner, optimizer, split_batches=True)
    scheduler.gradient_state = state
    step_per_process(scheduler, make_batches(4, 3))
    for is_synced, expected in ((True, 3), (False, 3), (True, 6), (True, 8), (True, 8)):
        state.sync_gradients = is_synced
        scheduler.step()
        assert inner.last_epoch == expected


@pytest.mark.soak
def test_example_as_it_is_passes_assert_same_run() -> None:
    """With a worker and a node killed."""
    flags = ["--preload", "sklearn.datasets"]
    faults = [Fault("kill-worker", rank=1, step=20), Fault("kill-node", node=2, step=80)]
    assert_same_run(EXAMPLE, faults=faults, flags=flags, lines="^epoch")
