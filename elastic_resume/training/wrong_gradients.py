"""Let a model compute wrong gradients, as a broken device does: a fault for tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class _FlippedBit(torch.autograd.Function):
    """Flips a bit of a gradient: the highest of the mantissa of the largest element."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        del ctx
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        wrong = gradients[0].clone(memory_format=torch.contiguous_format)
        word: torch.dtype = getattr(torch, f"int{8 * wrong.itemsize}")
        highest_bit = -math.frexp(torch.finfo(wrong.dtype).eps)[1]
        wrong.view(-1)[wrong.abs().argmax()].view(word).bitwise_xor_(1 << highest_bit)
        return wrong


def flip_gradients(wrapped: DistributedDataParallel | None) -> None:
    """Let the first layer of a DDP module with parameters get a wrong gradient in each backward pass."""
    if wrapped is None:
        return
    layer = next(part for part in wrapped.modules() if any(p.requires_grad for p in part.parameters(False)))
    forward = layer.forward

    def compute(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):  # of a recurrent layer
            return (_FlippedBit.apply(output[0]), *output[1:])  # type: ignore[no-untyped-call]
        return _FlippedBit.apply(output) if output.requires_grad else output  # type: ignore[no-untyped-call]

    layer.forward = compute
