"""Read and rebuild tensors that FSDP divides over the ranks of a node (`torch.distributed.tensor.DTensor`).

A rank tracks its local shard of each. `describe` reads mesh and placements, and refuses what a node cannot
hold as a whole. The meaning of ``Shard`` and ``Replicate`` is that of torch's placements:
https://docs.pytorch.org/docs/stable/distributed.tensor.html.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.checkpoint.shards import Shards
from elastic_resume.errors import UntrackableError


def is_dtensor(value: Any) -> bool:
    """Return whether ``value`` is a DTensor. Its module, which takes a second to import, may be missing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def to_local(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, the same object each time; any other tensor as it is.

    `DTensor.to_local` would make a new view at each call. Not public.
    """
    local: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # noqa: SLF001
    return local


def describe(tensor: Any, path: str) -> tuple[Shards, int]:
    """Return how a DTensor is divided, and which shard this rank holds.

    Raises:
        UntrackableError: it is divided in more than one way, or unevenly, or not at all.

    """
    mesh = tensor.device_mesh
    kinds = {type(placement).__name__ for placement in tensor.placements}
    divided = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    if not divided or kinds - {"Shard", "Replicate"}:
        raise UntrackableError(
            f"{path}: a DTensor with the placements {tensor.placements} cannot be stored. Track those that "
            "fully_shard() makes, with Shard and Replicate placements; keep other tensors plain."
        )
    wide = [dim for dim in divided if mesh.size(dim) > 1]
    if len(wide) > 1:
        raise UntrackableError(
            f"{path}: it is divided over {len(wide)} dimensions of its mesh {mesh}, and one is supported: "
            "shard over the ranks of a node, and replicate over the nodes. Set the degrees of tensor, "
            "pipeline, context and expert parallelism to 1."
        )
    (mesh_dim,) = wide or divided[:1]
    dim = tensor.placements[mesh_dim].dim % tensor.dim()
    shards, index = Shards(dim, tensor.shape[dim], mesh.size(mesh_dim)), mesh.get_local_rank(mesh_dim)
    local = to_local(tensor)
    if tuple(local.shape) != shards.shape(index, tuple(local.shape)):
        raise UntrackableError(
            f"{path}: this rank's part is {list(local.shape)} of {list(tensor.shape)}, and not shard {index} "
            f"of {shards.count} as torch.chunk makes them, so it cannot be stored."
        )
    return shards, index


def has_divided_parameters(tracked: Mapping[str, Any]) -> bool:
    """Return whether a rank holds only parts of the tracked models."""
    models = [item for item in tracked.values() if isinstance(item, nn.Module)]
    dtensors = filter(is_dtensor, (parameter for model in models for parameter in model.parameters()))
    return any(describe(parameter, "")[0].count > 1 for parameter in dtensors)


def find_shard_ranks(tensor: Any) -> list[int]:
    """Return the ranks that hold the shards of a DTensor that `describe` accepts, in their order."""
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_shard() and tensor.device_mesh.size(mesh_dim) > 1:
            return dist.get_process_group_ranks(tensor.device_mesh.get_group(mesh_dim))
    return [dist.get_rank()]


class LiveShards:
    """The ways in which live tensors are divided, to divide a stored tensor in the same way."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._like: dict[tuple[int, int], tuple[Any, int]] = {}
        for tensor in tensors:
            if is_dtensor(tensor):
                shards, index = describe(tensor, "")
                self._like.setdefault((shards.dim, shards.count), (tensor, index))

    def find(self, ref: TensorRef) -> Any:
        """Return a live DTensor that is divided as ``ref`` is, or None."""
        if ref.shards is None:
            return None
        return self._like.get((ref.shards.dim, ref.shards.count), (None, 0))[0]

    def find_name(self, ref: TensorRef) -> str:
        """Return the name of the shard that this rank holds; of the first one if no live tensor tells."""
        if ref.shards is None:
            return ref.name
        _, index = self._like.get((ref.shards.dim, ref.shards.count), (None, 0))
        return ref.shards.name(ref.name, index)

    def shape_of(self, ref: TensorRef, peek_tensor: Callable[[str], Tensor]) -> tuple[int, ...]:
        """Return the shape of the whole tensor as it is stored."""
        shape = list(peek_tensor(self.find_name(ref)).shape)
        if ref.shards is not None:
            shape[ref.shards.dim] = ref.shards.size
        return tuple(shape)


def read_whole(ref: TensorRef, get_tensor: Callable[[str], Tensor]) -> Tensor:
    """Return a stored tensor, put together from its shards."""
    if ref.shards is None:
        return get_tensor(ref.name)
    return torch.cat([get_tensor(name) for name in ref.stored_names], ref.shards.dim)


def read_own(ref: TensorRef, live: Any, get_tensor: Callable[[str], Tensor]) -> Tensor:
    """Return the part of a stored tensor that this rank holds of ``live``, whatever division is stored."""
    shards, index = describe(live, ref.name)
    dim, (start, stop) = shards.dim, shards.extent(index)
    if ref.shards is None or ref.shards.dim != dim:
        return read_whole(ref, get_tensor).narrow(dim, start, stop - start).clone()
    parts = []
    for number, name in enumerate(ref.stored_names):
        first, end = ref.shards.extent(number)
        low, high = max(first, start), min(end, stop)
        if (low, high) == (first, end) and (low < high or number == index):
            parts.append(get_tensor(name))
        elif low < high:
            parts.append(get_tensor(name).narrow(dim, low - first, high - low).clone())
    if not parts:  # this rank holds nothing of it
        return get_tensor(ref.stored_names[0]).narrow(dim, 0, 0).clone()
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def rebuild(local: Tensor, live: Any) -> Tensor:
    """Return the DTensor whose part on this rank is ``local``, divided as ``live`` is.

    Their sizes may differ in the dimensions that are not divided.
    """
    shards, _ = describe(live, "")
    shape = list(local.shape)
    shape[shards.dim] = shards.size
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    size, stride, mesh = torch.Size(shape), tuple(strides), live.device_mesh
    made: Tensor = type(live).from_local(
        local, mesh, live.placements, run_check=False, shape=size, stride=stride
    )
    return made
