"""Keep what a model is called with, on rank 0, in the steps that are checked.

The call is that of DDP: hooks of a model that is compiled in place would be compiled too. Collectives are
counted within it, since DDP sends buffers before it calls the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from elastic_resume.mechanisms.compute_check.computation import list_state, read_modes
from elastic_resume.mechanisms.compute_check.device import unwrap
from elastic_resume.mechanisms.compute_check.request import NotCheckable, Request, TensorFormat, encode


class CallRecorder:
    """Keeps the newest call of a model that may train, from `attach` to `take`."""

    def __init__(self, ddp: DistributedDataParallel, count_collectives: Callable[[], int]) -> None:
        self._ddp = ddp
        self._count_collectives = count_collectives
        self._collectives = 0
        self._hooks: list[RemovableHandle] = []
        self._call: tuple[Request, list[Tensor]] | None = None
        self._problem: NotCheckable | None = None

    def attach(self) -> None:
        """Begin to record, after the script's own hooks have seen a call."""
        self._hooks = [
            self._ddp.register_forward_pre_hook(_Hook(self._begin), with_kwargs=True),
            self._ddp.module.register_forward_pre_hook(_Hook(self._count)),
            self._ddp.module.register_forward_hook(_Hook(self._compare_count)),
        ]

    def detach(self) -> None:
        """Record no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take(self) -> tuple[Request, list[Tensor]] | None:
        """Return the newest call and its tensors, None without one, and forget it.

        Raises:
            NotCheckable: it cannot be repeated.

        """
        call, problem = self._call, self._problem
        self._call = self._problem = None
        if problem is not None:
            raise problem
        return call

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        try:
            self._call, self._problem = _record(self._ddp, args, kwargs), None
        except NotCheckable as problem:
            self._problem = problem

    def _count(self, *_: object) -> None:
        self._collectives = self._count_collectives()

    def _compare_count(self, *_: object) -> None:
        if self._count_collectives() != self._collectives and torch.is_grad_enabled():
            self._problem = NotCheckable(
                "its forward pass has a collective, in which ranks would wait for each other"
            )


class _Hook:
    """A hook that copies and pickles of the model do without: it refers to all of a generation."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_idle_hook, ()


def _get_idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: object) -> None:
    pass


def _record(
    ddp: DistributedDataParallel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Request, list[Tensor]]:
    module, tensors = unwrap(ddp), list[Tensor]()
    arguments = encode(args, "argument ", tensors)
    keywords = encode(kwargs, "keyword ", tensors)
    if ddp.device_ids:  # as DDP does with arguments
        tensors = [tensor.to(torch.device(ddp.device_type, ddp.device_ids[0])) for tensor in tensors]
    formats = [TensorFormat.of(tensor, f"argument tensor {i}") for i, tensor in enumerate(tensors)]
    state = list(list_state(module))
    for path, name, tensor in state:
        formats.append(TensorFormat.of(tensor.detach(), f"{path}.{name}".removeprefix(".")))
        tensors.append(tensor)
    kinds = {"cpu", *(parameter.device.type for parameter in module.parameters())}
    request = Request(
        0,
        arguments,
        keywords,
        tuple(formats),
        tuple((path, name) for path, name, _ in state),
        read_modes(module),
        tuple((kind, torch.is_autocast_enabled(kind), _name_dtype(kind)) for kind in sorted(kinds)),
    )
    return request, [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


def _name_dtype(kind: str) -> str:
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
