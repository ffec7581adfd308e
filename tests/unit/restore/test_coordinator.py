"""A cold start gives all ranks the values of rank 0; estimates of space; the command that is resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic_resume import constants
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.config import Settings
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.errors import ElasticResumeError, MachineError, UntrackableError
from elastic_resume.events import EventLog
from elastic_resume.policy.resume_plan import Inventory, ResumePlan, SavedState
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore import coordinator
from elastic_resume.restore.coordinator import ResumeResult
from elastic_resume.slots.progress_page import ProgressPage
from elastic_resume.state import dtensors, state_dict
from tests.support.checkpoint_samples import RUN, make_manifest, save_checkpoint
from tests.support.resumer import objects, read_values
from tests.support.state_image import Box
from tests.support.thread_ranks import ThreadCollectives, run_ranks

Build = Callable[[int], dict[str, Any]]


def make_context(collectives: Collectives, directory: Path, nodes: str) -> RankContext:
    """Return the context of a rank; ``nodes`` has one letter per rank."""
    node = nodes[collectives.rank]
    settings = Settings.for_worker({}, "train.py", ckpt_dir=directory, run_id=RUN, node_name=node, keep=2)
    return RankContext(collectives, settings, EventLog(directory / constants.EVENTS_FILE, node=node))


def start_cold(directory: Path, build: Build, nodes: str = "ab") -> list[tuple[dict[str, Any], str]]:
    """Start what ``build`` returns for each rank; return it, and the error."""

    def start(collectives: ThreadCollectives) -> tuple[dict[str, Any], str]:
        context, tracked = make_context(collectives, directory, nodes), build(collectives.rank)
        name = (directory, RUN, context.node)
        claimed = NodeDir.claim(*name) if context.is_local_leader else None
        collectives.gather(None)
        with claimed or NodeDir.attach(*name) as node_dir:
            page = ProgressPage(node_dir.path / constants.PROGRESS_FILE)
            try:
                result = coordinator.restore(context, node_dir, page, None, tracked)
            except ElasticResumeError as error:
                return tracked, str(error)
            finally:
                collectives.gather(None)
            assert (result.plan.kind, result.committed_step, node_dir.read_generation()) == ("cold", 0, 1)
            digests = [
                state_dict.digest_leaves(flat.leaves)
                for flat in (result.flat_state, state_dict.flatten(tracked))
            ]
            assert digests[0] == digests[1], "the state from before the start was returned"
        return tracked, ""

    return run_ranks(len(nodes), start)


@pytest.mark.parametrize("values", [(3.0, 4.0), (3.0, 0.0), (0.0, 4.0)])
def test_cold_start_gives_all_ranks_the_values_of_rank_0(values: tuple[float, float], tmp_path: Path) -> None:
    """An optimizer without state, beside a value of 0, takes it from rank 0, or loses its own."""
    first = values[0]

    def build(rank: int) -> dict[str, Any]:
        value = values[rank > 0]
        tracked = objects(value, 100.0 + rank)
        return {"ema": tracked.pop("average"), "box": Box([value])} | tracked

    for tracked, error in start_cold(tmp_path, build, "aab"):
        assert not error
        assert read_values({**tracked, "average": tracked["ema"]}) == {"values": [first], "buffer": 100.0}
        assert (tracked["box"].value, len(tracked["optimizer"].state)) == ([first], 4 if first else 0)


@pytest.mark.parametrize("is_different", [False, True])
def test_each_rank_keeps_its_own_and_loads_only_what_differs(is_different: bool, tmp_path: Path) -> None:
    """Its random numbers are its own. Rank 0 loads nothing."""
    own = [Box([rank]) for rank in range(2)]
    values = [[0], [int(is_different)]]
    (first, _), (second, _) = start_cold(
        tmp_path, lambda rank: {"elastic_resume.rng": own[rank], "box": Box(values[rank])}
    )
    assert [box.value for box in own] == [[0], [1]]
    assert first["box"].value is values[0]
    assert (second["box"].value is values[1]) == (not is_different)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda rank: {"model": nn.Linear(2, 2 + rank)},
            "the model (model/weight) differs on rank 0 against",
        ),
        (
            lambda rank: {"data": GlobalBatches(8, 2, seed=rank)},
            "the order of samples (data) differs on rank 0 against rank 1",
        ),
        (
            lambda rank: {coordinator.PARAMETERS: Box(rank)},
            "the order of the optimizer's parameters (elastic_",
        ),
        (
            lambda rank: {"box": Box(torch.zeros(1) if rank == 0 else 0)},
            "no rank of rank 0's node has 'box/value'",
        ),
        (lambda rank: {"box": Box(print if rank else 0)}, "builtin_function_or_method"),
    ],
)
def test_different_objects_are_refused_on_all_ranks(build: Build, text: str, tmp_path: Path) -> None:
    """Before the first step, with the first difference."""
    for _, error in start_cold(tmp_path, build):
        assert text in error


def test_optimizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    """It cannot take the state of rank 0's."""

    def build(rank: int) -> dict[str, Any]:
        parameters = [nn.Parameter(torch.zeros(2))]
        kind = torch.optim.SGD if rank else torch.optim.Adam
        return {"optimizer": kind(parameters, lr=0.1)}

    for _, error in start_cold(tmp_path, build):
        assert "the ranks built different objects" in error


def test_full_disk_of_one_node_prevents_cold_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks."""

    def refuse(node_dir: NodeDir, bytes_needed: int) -> None:
        if node_dir.path.name == "b":
            raise MachineError(f"{bytes_needed} bytes are needed")

    monkeypatch.setattr(NodeDir, "ensure_free_space", refuse)
    for _, error in start_cold(tmp_path, lambda _: {"model": nn.Linear(4, 4)}):
        assert "240 bytes are needed" in error


@pytest.mark.parametrize(
    ("steps", "linked", "count"), [(0, 0, 3), (1, 0, 2), (2, 0, 1), (5, 0, 1), (1, 1, 2)]
)
def test_space_is_needed_for_checkpoints_to_come(steps: int, linked: int, count: int, tmp_path: Path) -> None:
    """Two are kept, and one more is written before the oldest is deleted. Links need no space here."""
    node, needed = tmp_path / RUN / "a", list[int]()
    node.mkdir(parents=True)
    for step in range(1, steps + linked + 1):
        path = save_checkpoint(node, 1, step)
        if step > steps:
            path.rename(tmp_path / path.name)
            path.symlink_to(tmp_path / path.name)
    context = make_context(Collectives(0, 1, None), tmp_path, "a")
    tracked = {"model": nn.Linear(4, 4)}
    node_dir: Any = SimpleNamespace(ensure_free_space=needed.append)
    assert coordinator._check_disk_space(context, node_dir, state_dict.flatten(tracked), tracked) is None
    assert needed == [count * 80]


def test_state_of_optimizer_is_estimated_until_it_has_one() -> None:
    """Adam has two moments per parameter, and a number of steps."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    tracked = {"model": model, "optimizer": optimizer}
    assert coordinator.estimate_state_bytes(state_dict.flatten(tracked), tracked) == 3 * 80
    model(torch.zeros(4)).sum().backward()
    optimizer.step()
    assert coordinator.estimate_state_bytes(state_dict.flatten(tracked), tracked) == 3 * 80 + 2 * 4


@pytest.mark.parametrize(
    ("commands", "kind", "restarted", "expected"),
    [
        ("abc", "resumed", False, ("c.py",)),
        ("ab", "resumed", False, ("b.py",)),
        ("a", "resumed", False, ("a.py",)),
        ("", "resumed", False, ()),
        ("abc", "resumed", True, None),
        ("abc", "cold", False, None),
    ],
)
def test_earlier_command_is_that_of_the_states_owner(
    commands: str, kind: str, restarted: bool, expected: tuple[str, ...] | None
) -> None:
    """Else of the node that reads it, else of any."""
    plan = ResumePlan(kind, source_node="b", holders=(("b", SavedState("c", 1, 9, 0)),))
    inventories = [
        Inventory(node, 0, command=(f"{node}.py",) if node in commands else (), has_restarted=restarted)
        for node in "abc"
    ]
    assert coordinator._find_earlier_command(plan, inventories) == expected


def test_fsdp1_is_refused(tmp_path: Path) -> None:
    """Its shards cannot be read."""
    wrapped = type("FullyShardedDataParallel", (nn.Linear,), {})
    for _, error in start_cold(tmp_path, lambda _: {"box": Box(), "model": nn.Sequential(wrapped(1, 1))}):
        assert "model: it is in FullyShardedDataParallel (FSDP1)" in error


@pytest.mark.parametrize(
    ("nodes", "shard_ranks", "text"),
    [
        ("aabb", [0, 1], ""),
        ("aabb", [0], ""),  # one shard is a whole tensor
        ("aabb", [0, 1, 2, 3], r"over the ranks \[0, 1, 2, 3\], and node a has the ranks \[0, 1\]"),
        ("aab", [0, 1], "the nodes have different numbers of ranks"),
    ],
)
def test_each_node_must_hold_the_whole_sharded_model(
    nodes: str, shard_ranks: list[int], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its loss would lose a part of it."""
    monkeypatch.setattr(dtensors, "is_dtensor", lambda _: True)
    monkeypatch.setattr(dtensors, "find_own_shard", lambda *_: None)
    monkeypatch.setattr(dtensors, "find_shard_ranks", lambda _: shard_ranks)
    context: Any = SimpleNamespace(node_by_rank=[*nodes], node="a")
    with pytest.raises(UntrackableError, match=text) if text else contextlib.nullcontext():
        coordinator._check_shards(context, {"model": nn.Linear(1, 1)})


@pytest.mark.parametrize(("on_disk", "committed_step"), [(True, 9), (False, -1)])
def test_step_is_committed_if_the_own_disk_holds_it(on_disk: bool, committed_step: int) -> None:
    """A snapshot from elsewhere is not."""
    flat = state_dict.flatten({})
    result = ResumeResult(ResumePlan("resumed", step=9), make_manifest(), flat, ("a",), 0.0, on_disk)
    assert result.committed_step == committed_step
