"""Let all ranks compute rank 0's batch, and name the rank whose gradients differ.

A wrong gradient of one rank is averaged into every replica, so the comparison of replicas cannot see it. At
the end of a due step::

    rank 0 describes the newest call of its model     no rank goes on unless all can
    all ranks receive its arguments and buffers
    all compute forward and backward, and gather a digest; if some differ, twice more

All ranks hold the same parameters then. What a rank decides follows from gathered values, so all ranks do the
same at each point, and no collective waits for a rank that does not come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume import constants, events
from elastic_resume.errors import HardwareError
from elastic_resume.mechanisms.compute_check.computation import compute, digest_tensor
from elastic_resume.mechanisms.compute_check.description import (
    CHECK_EVENT,
    DIFFERENCE_EVENT,
    OFF_EVENT,
    GradientDifference,
    describe_difference,
    describe_off,
)
from elastic_resume.mechanisms.compute_check.device import (
    describe_device,
    find_gpu_uuid,
    find_obstacle,
    unwrap,
)
from elastic_resume.mechanisms.compute_check.judge import (
    ComputeComparison,
    Outcome,
    RankResult,
    compare,
    needs_repeat,
)
from elastic_resume.mechanisms.compute_check.recorder import CallRecorder
from elastic_resume.mechanisms.compute_check.request import NotCheckable, Request
from elastic_resume.mechanisms.mechanism import StepObserver, WorkerContext

logger = logging.getLogger(__name__)

Call = tuple[Request, list[Tensor]]
REPEATS = 2
FAULT_TIMES = 2
"""How often a rank's gradients may differ from the others' until its machine counts as broken."""


class ComputeCheck(StepObserver):
    """Compares the ranks' computations every few steps, in one generation."""

    def __init__(self, context: WorkerContext, every: int) -> None:
        self._context, self._every = context, every
        self._step = context.step
        self._next_step = _find_due_step(context.step, every)
        self._is_on = True
        self._may_be_due = False
        """Whether this step may be due, so that rank 0 records it; more than one step may end at once."""
        self._is_strict = True
        self._wrappers: list[weakref.ref[DistributedDataParallel]] = []
        self._recorders: dict[int, CallRecorder] = {}
        """By the index of the wrapper; of this step, on rank 0."""
        self._has_warned = False
        self._compared: set[int] = set()
        """The wrappers, by index, that were checked before: from then on one computation is enough."""
        self._agreed_step = 0
        self._unstable_ranks: set[int] = set()
        self._own: list[dict[str, str]] = []
        """The digests of this rank, of each time that it has computed in this check."""
        self._attach()

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Check ``ddp`` too."""
        if all(wrapper() is not ddp for wrapper in self._wrappers):
            self._wrappers.append(weakref.ref(ddp))
            self._attach()

    def end_step(self, step: int) -> None:
        """Check if it is due, and record what the next step computes if that will be.

        Raises:
            HardwareError: this rank computes wrongly.

        """
        self._step = step
        recorders, self._recorders = self._recorders, {}
        for recorder in recorders.values():
            recorder.detach()
        if not self._is_on:
            return
        if self._may_be_due and step >= self._next_step:
            self._next_step = _find_due_step(step, self._every)
            started_at = time.monotonic()
            try:
                has_checked = self._check(recorders)
            except NotCheckable as reason:
                self._turn_off(str(reason))
                return
            if has_checked and self._context.local_rank == 0:
                self._context.emit(
                    CHECK_EVENT,
                    ranks=self._context.world_size,
                    is_equal=self._agreed_step == step,
                    seconds=round(time.monotonic() - started_at, 4),
                )
        self._attach()

    def close(self) -> None:
        """Check no more."""
        self._is_on = False
        for recorder in self._recorders.values():
            recorder.detach()
        self._recorders = {}

    def _attach(self) -> None:
        self._may_be_due = self._is_on and self._step + 1 >= self._next_step
        if not self._may_be_due or self._context.rank:
            return
        for index, wrapper in enumerate(self._wrappers):
            ddp = wrapper()
            if ddp is not None and index not in self._recorders:
                recorder = CallRecorder(ddp, self._context.count_collectives)
                self._recorders[index] = recorder
                recorder.attach()

    # ---- one check: all ranks come to each gather and broadcast ---------------------------------------

    def _check(self, recorders: dict[int, CallRecorder]) -> bool:
        """Check the models that rank 0 has called in this step; return whether there was one."""
        calls: dict[int, Call] = {}
        problem, sizes = "", [0] * len(self._wrappers)
        try:
            for ddp in filter(None, (wrapper() for wrapper in self._wrappers)):
                find_obstacle(ddp)
            for index, recorder in recorders.items():
                if (call := recorder.take()) is not None:
                    calls[index] = (dataclasses.replace(call[0], seed=self._step), call[1])
                    sizes[index] = len(calls[index][0].to_bytes())
        except Exception as error:  # noqa: BLE001 - of the script's objects; the other ranks wait
            problem = _describe_error(error)
        rows = self._gather_unless(problem, sizes)
        if any(len(row) != len(sizes) for row in rows):
            raise NotCheckable("ranks have different numbers of DDP modules")
        if not any(rows[0]) and not self._has_warned:
            self._has_warned = True
            if self._context.rank == 0:
                logger.warning(
                    "no forward pass of a model in DDP was seen in step %d, so it is not checked: a sharded "
                    "model is not, nor is torch.compile around DDP. Compile the model before run.ddp() or "
                    "DistributedDataParallel wraps it.",
                    self._step,
                )
        is_equal = True
        for index, size in enumerate(rows[0]):
            if size:
                is_equal &= self._check_model(index, calls.get(index), size)
        if any(rows[0]) and is_equal:
            self._agreed_step = self._step
        return any(rows[0])

    def _check_model(self, index: int, call: Call | None, size: int) -> bool:
        """Compute a call of rank 0 on all ranks; return whether all have the same."""
        module, request, tensors = self._receive(index, call, size)
        self._own = []
        times = 1 if index in self._compared and self._context.world_size > 1 else 2
        self._compared.add(index)
        results = self._measure(module, request, tensors, times)
        if needs_repeat(results):
            more = self._measure(module, request, tensors, REPEATS)
            results = [
                RankResult(first.digests + then.digests, first.device)
                for first, then in zip(results, more, strict=True)
            ]
        comparison = compare(results, self._unstable_ranks)
        if comparison.outcome in {Outcome.UNSTABLE, Outcome.ALL_DIFFERENT}:
            raise NotCheckable(describe_off(comparison, self._agreed_step))
        if comparison.outcome is not Outcome.EQUAL:
            state = [parameter.detach() for parameter in module.parameters()]
            self._report(comparison, results, [*state, *tensors])
        return comparison.outcome is Outcome.EQUAL

    def _find_wrapper(self, index: int) -> DistributedDataParallel:
        ddp = self._wrappers[index]()
        if ddp is None:
            raise NotCheckable("a model is gone")
        return ddp

    def _receive(self, index: int, call: Call | None, size: int) -> tuple[nn.Module, Request, list[Tensor]]:
        """Return the model without wrappers, and rank 0's call."""
        data = torch.frombuffer(bytearray(call[0].to_bytes() if call else size), dtype=torch.uint8)
        self._broadcast([data])
        module, tensors, problem = nn.Module(), [], ""
        request = Request.from_bytes(bytes(data.tolist()))
        try:
            module = unwrap(self._find_wrapper(index))
            device = _find_device(module)
            tensors = call[1] if call else [form.allocate(device) for form in request.formats]
        except Exception as error:  # noqa: BLE001 - also of the device, whose memory may be full
            problem = _describe_error(error)
        self._gather_unless(problem, None)
        self._broadcast(tensors)
        return module, request, tensors

    def _measure(
        self, module: nn.Module, request: Request, tensors: Sequence[Tensor], times: int
    ) -> list[RankResult]:
        """Compute so often on each rank, and return the results of all."""
        own, problem = [], ""
        try:
            own = [compute(module, request, tensors, is_strict=self._is_strict) for _ in range(times)]
        except Exception as error:  # noqa: BLE001 - whatever the model raises, of which other ranks must know
            problem = _describe_error(error)
        digests = [_combine(each.values()) for each in own]
        row = {"problem": problem, "digests": digests, "device": describe_device(_find_device(module))}
        rows = self._context.gather(row)
        problems = [f"{each['problem']} (rank {rank})" for rank, each in enumerate(rows) if each["problem"]]
        if problems and self._is_strict:  # perhaps torch has no deterministic algorithm for it
            self._is_strict = False
            return self._measure(module, request, tensors, times)
        if problems:
            raise NotCheckable(problems[0])
        self._own += own
        return [RankResult(tuple(each["digests"]), each["device"]) for each in rows]

    def _report(
        self, comparison: ComputeComparison, results: Sequence[RankResult], inputs: Sequence[Tensor]
    ) -> None:
        """Log and emit a difference.

        Raises:
            HardwareError: this rank computes wrongly, not for the first time, and did not always. Else the
                model may compute something else on this rank, and nodes would leave one after the other.

        """
        context, gpu = self._context, find_gpu_uuid(inputs[0].device)
        earlier, has_agreed = self._read_earlier(gpu)
        rows = context.gather(
            {
                "digests": [[digest[:8] for digest in each.values()] for each in self._own],
                "inputs": _combine(map(digest_tensor, inputs)),
                "node": context.node_dir.name,
                "gpu": gpu,
                "times": 1 + earlier,
            }
        )
        if comparison.outcome is Outcome.UNKNOWN:
            ranks = tuple(f"{rank} on {rows[rank]['node']}" for rank in comparison.ranks)
            found = GradientDifference(self._step, ranks=ranks, agreed_step=self._agreed_step)
            self._log_and_emit(found, is_own=context.rank == 0, first_node=rows[0]["node"])
            return
        self._unstable_ranks |= {rank for rank in comparison.ranks if not results[rank].is_stable}
        for rank in comparison.ranks:
            row, right = rows[rank], rows[comparison.majority[rank]]
            found = GradientDifference(
                self._step,
                rank,
                row["node"],
                row["gpu"],
                self._find_name(row["digests"], right["digests"]),
                self._agreed_step,
                row["times"],
                has_other_inputs=row["inputs"] != right["inputs"],
            )
            self._log_and_emit(found, is_own=context.rank == rank, first_node=rows[0]["node"])
            is_fault = found.times >= FAULT_TIMES and has_agreed and not found.has_other_inputs
            if context.rank == rank and is_fault:
                raise HardwareError(f"{describe_difference(found)}.")

    def _find_name(self, own: Sequence[Sequence[str]], right: Sequence[Sequence[str]]) -> str:
        """Return the first output or parameter of which a rank has another digest."""
        names = [*self._own[0]]
        for one, other in zip(own, right, strict=True):
            for name, digest, expected in zip(names, one, other, strict=False):
                if digest != expected:
                    return name
        return ""

    def _read_earlier(self, gpu: str) -> tuple[int, bool]:
        """Return how often this GPU, or this local rank without one, was named before in this run.

        And return whether this node's ranks have ever computed the same as others.
        """
        log = events.read(self._context.node_dir / constants.EVENTS_FILE)
        key, value = ("gpu", gpu) if gpu else ("local_rank", self._context.local_rank)
        times, has_agreed = 0, self._agreed_step > 0
        with contextlib.suppress(OSError):  # a bad disk must not end a rank for which the others wait
            for event in log:
                if event["event"] == DIFFERENCE_EVENT and event.get(key) == value:
                    times += event.get("rank") is not None and not event.get("has_other_inputs")
                elif event["event"] == CHECK_EVENT and event.get("is_equal") is True:
                    has_agreed |= (events.get_count(event, "ranks") or 0) > 1
        return times, has_agreed

    def _log_and_emit(self, found: GradientDifference, *, is_own: bool, first_node: str) -> None:
        """Log on the nodes of rank 0 (``first_node``) and of the rank, once on each; emit on the latter."""
        context = self._context
        if context.rank == 0 or (is_own and context.node_dir.name != first_node):
            logger.warning("%s.", describe_difference(found))
        if is_own:
            fields = dataclasses.asdict(found)
            del fields["step"]
            self._context.emit(DIFFERENCE_EVENT, **fields, local_rank=self._context.local_rank)

    def _turn_off(self, reason: str) -> None:
        self.close()
        if self._context.rank == 0:
            logger.warning("compute checks are off: %s.", reason)
            self._context.emit(OFF_EVENT, reason=reason)

    def _gather_unless(self, problem: str, value: Any) -> list[Any]:
        """Return the values of all ranks, or raise on all of them if one has a problem."""
        rows = self._context.gather([problem, value])
        for rank, row in enumerate(rows):
            if row[0]:
                raise NotCheckable(f"{row[0]} (rank {rank})")
        return [row[1] for row in rows]

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        if tensors and self._context.world_size > 1:
            self._context.broadcast_tensors(tensors, 0)


def _find_due_step(step: int, every: int) -> int:
    """Return the first step after ``step`` that is due."""
    return (step // every + 1) * every


def _combine(digests: Iterable[str]) -> str:
    return xxhash.xxh3_64("".join(digests).encode()).hexdigest()


def _find_device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _describe_error(error: Exception) -> str:
    if isinstance(error, NotCheckable):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200].rstrip('.')}"
