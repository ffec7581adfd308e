"""Touch the memory that a restore will need, in a process that waits for its node's first view.

The first touch of memory costs as much as the rest of a restore. A node that comes back empty touches new
memory twice: its slot, and its optimizers' state. `prepare` touches both before the restore. If the
estimated size is wrong, the restore allocates new memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_resume.slots import slot_memory
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.state.dtensors import to_local

_MIN_BYTES = 64 << 10  # smaller tensors lie in memory that the allocator has touched already


class TensorPool:
    """Touched tensors on the CPU, which a restore fills and gives to optimizers in place of new ones."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
        for tensor in tensors:
            self._tensors.setdefault((tensor.dtype, tensor.shape), []).append(tensor)

    def copy(self, source: Tensor) -> Tensor:
        """Return a copy of ``source``, in a tensor of the pool if one fits."""
        with self._lock:
            fitting = self._tensors.get((source.dtype, source.shape))
            target = fitting.pop() if fitting else None
        return source.clone() if target is None else target.copy_(source)


def prepare(tracked: Mapping[str, Any], state_bytes: int, slot_client: SlotClient | None) -> TensorPool:
    """Touch the memory of one slot and of the optimizers' state; return the tensors, for `restore`.

    The first slot is ready when this returns. The others follow in the background.

    Args:
        tracked: name -> object, from `collect_objects`.
        state_bytes: the expected size of the state.
        slot_client: None, or one of a rank that is not local leader, reserves no slot.

    """
    leader_client = slot_client if slot_client is not None and slot_client.is_local_leader else None
    slot_bytes = slot_memory.estimate_slot_bytes(state_bytes)
    if leader_client is not None:
        leader_client.prepare_slots(slot_bytes, is_estimate=True)
    new = (
        torch.empty(to_local(parameter).shape, dtype=parameter.dtype).zero_()
        for item in tracked.values()
        if isinstance(item, Optimizer) and not item.state
        for group in item.param_groups
        for parameter in group["params"]
        if parameter.device.type == "cpu" and parameter.nbytes >= _MIN_BYTES
        for _ in range(count_state_tensors(group))
    )
    pool = TensorPool(new)
    if leader_client is not None:
        leader_client.reserve(slot_bytes, is_estimate=True, all_now=False)  # waits for the first one
    return pool


def count_state_tensors(group: Mapping[str, Any]) -> int:
    """Estimate, from the hyperparameters' names, how many tensors per parameter an optimizer will hold."""
    if "betas" in group:  # the Adam family
        return 3 if group.get("amsgrad") else 2
    if "momentum" in group:  # SGD, RMSprop
        return bool(group["momentum"]) + ("alpha" in group) + bool(group.get("centered"))
    return 2
