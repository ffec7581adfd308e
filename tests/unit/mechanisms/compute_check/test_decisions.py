"""Test the decisions of compute checks in a process whose peers are imitated, with real DDP."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume.errors import HardwareError
from elastic_resume.events import EventLog
from elastic_resume.mechanisms.compute_check.check import ComputeCheck
from elastic_resume.mechanisms.compute_check.computation import sum_rows
from elastic_resume.training.wrong_gradients import flip_gradients
from tests.support.agent_parts import make_worker_context

pytestmark = pytest.mark.usefixtures("process_group")

X = torch.linspace(-1, 1, 32).view(8, 4)
Answer = Callable[[int, Any], Any]


@dataclass
class Job:
    """A rank of a world whose other ranks answer as it does, unless a test says otherwise."""

    directory: Path
    world_size: int = 3
    every: int = 2
    step: int = 0
    answer: Answer = lambda _, value: value
    """What rank answers in place of this rank's value."""
    collectives: int = 0
    emitted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = EventLog(self.directory / "events.jsonl")
        self.check = ComputeCheck(
            make_worker_context(
                self.directory,
                world_size=self.world_size,
                step=self.step,
                emit=self.emit,
                count_collectives=lambda: self.collectives,
                gather=lambda value: [self.answer(rank, value) for rank in range(self.world_size)],
            ),
            self.every,
        )

    def emit(self, kind: str, **fields: Any) -> None:
        """Keep an event, and write it."""
        self.emitted.append((kind, fields))
        self.log.emit(kind, step=self.step, **fields)

    def train(self, *models: nn.Module, steps: int = 1, count: int = 1) -> list[tuple[int, str]]:
        """Take steps; return the kinds of events with their steps."""
        found = []
        for _ in range(steps):
            for model in models:
                model(X).sum().backward()
            self.step += count
            before = len(self.emitted)
            self.check.end_step(self.step)
            found += [(self.step, kind) for kind, _ in self.emitted[before:]]
        return found


def wrap(job: Job, model: nn.Module | None = None, **arguments: Any) -> DistributedDataParallel:
    """Return a model in DDP that the job watches."""
    ddp = DistributedDataParallel(model or nn.Linear(4, 4), **arguments)
    job.check.watch(ddp)
    job.check.watch(ddp)
    return ddp


def has_hooks(ddp: DistributedDataParallel) -> bool:
    """Return whether calls of the model are recorded."""
    return bool(ddp._forward_pre_hooks or ddp._forward_hooks)


def answer_wrongly(rank: int, times: int = 9, inputs: str = "") -> Answer:
    """Let a rank answer with other digests."""

    def answer(asked: int, value: Any) -> Any:
        if asked != rank or not isinstance(value, dict):
            return value
        digests = value["digests"]
        other = [["wrong", *each[1:]] if isinstance(each, list) else f"wrong{each}" for each in digests]
        changed = {**value, "digests": other}
        if "times" in value:
            changed = {**changed, "times": times, "node": "n9", "inputs": inputs or value["inputs"]}
        return changed

    return answer


def test_due_steps_are_checked_also_after_jumps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Multiples of the interval, or the next step if one is passed over. Only due steps have hooks."""
    job = Job(tmp_path, every=4, step=2)
    ddp = wrap(job)
    assert not has_hooks(ddp)
    assert job.train(ddp) == []
    assert has_hooks(ddp)
    assert job.train(ddp) == [(4, "compute-check")]
    assert job.train(ddp, count=5) == []  # to 9: nobody knew that step 8 would be passed over
    assert job.train(ddp, count=2) == [(11, "compute-check")]
    assert has_hooks(ddp)
    assert job.train(ddp, steps=5) == [(12, "compute-check"), (16, "compute-check")]
    assert not caplog.text
    job.check.close()
    assert not has_hooks(ddp)


def test_all_models_of_a_step_are_checked_and_others_later(tmp_path: Path) -> None:
    """One that no step has called costs nothing; one that is gone neither."""
    job = Job(tmp_path)
    first, second = wrap(job), wrap(job, nn.Linear(4, 2))
    assert job.train(first, second, steps=2) == [(2, "compute-check")]
    assert job.train(second, steps=2) == [(4, "compute-check")]
    del first
    gc.collect()
    assert job.train(second, steps=2) == [(6, "compute-check")]


def test_step_without_a_model_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sharded model is never seen; one that trains elsewhere may come."""
    job = Job(tmp_path)
    ddp = wrap(job)
    assert job.train(steps=4) == []
    assert caplog.text.count("no forward pass of a model in DDP was seen in step 2") == 1
    assert job.train(ddp, steps=2) == [(6, "compute-check")]


class Failing(nn.Linear):
    """A layer that works in training, and never in a check, in which a weight is a copy."""

    def forward(self, x: Tensor) -> Tensor:
        """Remember the weight."""
        if self.__dict__.setdefault("ids", [id(self.weight)]) != [id(self.weight)]:
            raise ValueError("no copies\nplease")
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(4, 4), "SyncBatchNorm lets ranks wait"),
        (Failing(4, 4), "ValueError: no copies (rank 0)"),
    ],
)
def test_model_that_cannot_be_checked_turns_checks_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: nn.Module, reason: str
) -> None:
    """The line has the reason; nothing is recorded any more."""
    job = Job(tmp_path)
    ddp = wrap(job, model)
    if reason.startswith("Sync"):  # DDP refuses it on CPUs
        ddp.module.add_module("norm", nn.SyncBatchNorm(4))
    assert job.train(ddp, steps=4) == [(2, "compute-check-off")]
    assert f"compute checks are off: {reason}" in caplog.text
    assert not has_hooks(ddp)


class Random(nn.Linear):
    """A layer that no seed makes deterministic."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Differ at each call."""
        Random.calls += 1
        return super().forward(x) * Random.calls


def test_model_that_is_not_deterministic_turns_checks_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No rank is named: most differ from themselves."""
    job = Job(tmp_path)
    assert job.train(wrap(job, Random(4, 4)), steps=4) == [(2, "compute-check-off")]
    assert "the same batch gives other gradients each time (rank 0, 1, 2)" in caplog.text


def test_odd_rank_is_named_on_rank_0_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It emits the event itself; here only the newest check's result is an event."""
    job = Job(tmp_path)
    ddp = wrap(job)
    job.train(ddp, steps=2)
    job.answer = answer_wrongly(1, times=1)
    assert job.train(ddp, steps=2) == [(4, "compute-check")]
    assert job.emitted[-1][1]["is_equal"] is False
    assert "rank 1 on n9 computes other gradients than the majority at step 4, from the same" in caplog.text
    job.answer = answer_wrongly(1, inputs="others")
    job.train(ddp, steps=2)
    assert "rank 1 on n9 computes other gradients than the majority at step 6, but from other" in caplog.text


def test_rank_ends_when_it_is_odd_for_the_second_time(tmp_path: Path) -> None:
    """In the run: the first time may have been in an earlier generation, and on the same local rank."""
    others: list[dict[str, Any]] = [{"local_rank": 1}, {"has_other_inputs": True}, {"rank": None}, {}]
    for number, other in enumerate(others):
        fields: dict[str, Any] = {"rank": 2, "local_rank": 0, "gpu": "", "step": number, **other}
        EventLog(tmp_path / "events.jsonl").emit("gradients-differ", **fields)
    job = Job(tmp_path)
    ddp = wrap(job)
    job.train(ddp, steps=2)
    right = answer_wrongly(1)
    job.answer = lambda rank, value: right(1, value) if rank else value
    with pytest.raises(HardwareError, match=r"rank 0 on .* at step 4, for the second time, from"):
        job.train(ddp, steps=2)
    assert job.emitted[-1][0] == "gradients-differ"
    assert job.emitted[-1][1]["times"] == 2


@pytest.mark.parametrize(("ranks", "ends"), [(None, False), (1, False), (2, True)])
def test_rank_that_was_always_odd_stays(tmp_path: Path, ranks: int | None, *, ends: bool) -> None:
    """The model may compute something else on it: under ``if rank == 0`` the next node would be odd."""
    log = EventLog(tmp_path / "events.jsonl")
    for step in range(3):
        log.emit("gradients-differ", rank=0, local_rank=0, gpu="", step=step)
    if ranks:
        log.emit("compute-check", ranks=ranks, is_equal=True, step=1)
    log.emit("compute-check", ranks=3, is_equal=False, step=2)
    job = Job(tmp_path)
    ddp = wrap(job)
    right = answer_wrongly(1)
    job.answer = lambda rank, value: right(1, value) if rank else value
    with pytest.raises(HardwareError) if ends else contextlib.nullcontext():
        job.train(ddp, steps=2)
    assert job.emitted[0][1]["times"] == 4


def test_rank_alone_compares_with_itself(tmp_path: Path) -> None:
    """A wrong bit that is there each time shows nothing."""
    job = Job(tmp_path, world_size=1)
    ddp = wrap(job)
    flip_gradients(ddp)
    assert job.train(ddp, steps=2) == [(2, "compute-check")]


class Custom(nn.Sequential):
    """A model with code of its own: torch compiles none of its own modules in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Call both layers."""
        return self[1](self[0](x))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("how", ["within DDP", "in place", "a part"])
def test_compiled_model_is_checked_without_its_compiled_code(tmp_path: Path, how: str) -> None:
    """The backend counts the graphs: a check makes none."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiler: Any = torch.compile
    job, model = Job(tmp_path), Custom(nn.Linear(4, 4), nn.Linear(4, 4))
    if how == "within DDP":
        ddp = wrap(job, compiler(model, backend=backend))
    elif how == "in place":
        model.compile(backend=backend)
        ddp = wrap(job, model)
    else:
        ddp = wrap(job, nn.Sequential(model[0], compiler(model[1], backend=backend)))
    assert job.train(ddp, steps=2) == [(2, "compute-check")]
    assert job.emitted[-1][1]["is_equal"]
    number = len(graphs)
    assert number
    assert job.train(ddp, steps=6) == [(4, "compute-check"), (6, "compute-check"), (8, "compute-check")]
    assert len(graphs) == number


@pytest.mark.parametrize("size", [1, 8, 8192, 8193, 20_000])
def test_each_changed_bit_changes_the_sum_of_its_row(size: int) -> None:
    """What a GPU sends instead of a gradient."""
    data = torch.arange(size).to(torch.uint8)
    before = sum_rows(data)
    assert before.numel() == -(-size // 8192)
    for place in {0, size // 2, size - 1}:
        for bit in range(8):
            changed = data.clone()
            changed[place] ^= 1 << bit
            assert (sum_rows(changed) != before).tolist() == [
                row == place // 8192 for row in range(before.numel())
            ]
