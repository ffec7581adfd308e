"""Builds DDP around a tracked model, and nothing else: no layer is converted, no parameter is moved.

A model that a script has wrapped by itself stays as it is, torch.compile around its DDP too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume import failpoints
from elastic_resume.state import state_dict
from elastic_resume.state.bucket_order import BucketOrder


def wrap(
    model: nn.Module, tracked: Mapping[str, Any], bucket_order: BucketOrder, ddp_kwargs: Mapping[str, Any]
) -> nn.Module:
    """Give ``model`` in a DDP whose buckets are those that the job had; see `Run.ddp`."""
    inner = state_dict.unwrap(model)
    name = next((name for name, item in tracked.items() if item is inner), None)
    wrapper = state_dict.find_parallel_wrapper(model)
    if wrapper is not None or not dist.is_initialized():
        if name is not None and isinstance(wrapper, DistributedDataParallel):
            bucket_order.prepare(name, inner, wrapper)
        return model
    wanted: dict[str, Any] = {"init_sync": False} if name is not None else {}
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and next(iter(devices)).type == "cuda":
        wanted["device_ids"] = [next(iter(devices)).index]
    wrapped = DistributedDataParallel(model, **{**wanted, **ddp_kwargs})
    if name is not None:
        bucket_order.prepare(name, inner, wrapped)
    failpoints.register_action("skip-collective", lambda: _skip_next_reduction(wrapped))
    return wrapped


def _skip_next_reduction(wrapped: DistributedDataParallel) -> None:
    """Let the next step's gradients stay this rank's own, as no_sync() in the wrong place does."""

    def back(*_: Any) -> None:
        wrapped.require_backward_grad_sync = True
        hook.remove()

    wrapped.require_backward_grad_sync = False
    hook = wrapped.register_forward_hook(back)
