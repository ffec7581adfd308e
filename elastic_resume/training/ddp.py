"""Wrap a model in DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume import failpoints
from elastic_resume.state.bucket_order import BucketOrder


def find_keys(
    name: str | None, model: nn.Module, order: BucketOrder, wrappers: Iterable[DistributedDataParallel]
) -> Collection[str] | None:
    """Return the parameters whose gradients DDP has averaged for the tracked model ``name``, None if unknown.

    A second wrapper in a generation takes the flags as they are: the script has changed them.
    """
    is_first = all(wrapper.module is not model for wrapper in wrappers)
    return order.get_keys(name or "") if is_first else ()


def wrap(model: nn.Module, *, is_tracked: bool, **arguments: Any) -> DistributedDataParallel:
    """Return ``model`` in DDP. ``arguments`` override those chosen here.

    A tracked model is not broadcast, because `er.resume` has compared all ranks.
    """
    chosen: dict[str, Any] = {"init_sync": False} if is_tracked else {}
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and next(iter(devices)).type == "cuda":
        chosen["device_ids"] = [next(iter(devices)).index]
    wrapped = DistributedDataParallel(model, **{**chosen, **arguments})
    register_faults(wrapped)
    return wrapped


def register_faults(wrapper: DistributedDataParallel) -> None:
    """Let tests inject the faults of a wrapper, whoever has made it."""
    reference = weakref.ref(wrapper)  # the registration outlives the generation
    failpoints.register_action("skip-collective", lambda: failpoints.skip_next_reduction(reference()))
    failpoints.register_action("wrong-gradients", lambda: _flip_gradients(reference()))


def _flip_gradients(wrapped: DistributedDataParallel | None) -> None:
    from elastic_resume.training import wrong_gradients  # noqa: PLC0415 - a fault of tests

    wrong_gradients.flip_gradients(wrapped)
