"""Read and make DTensors, which FSDP divides over the ranks of a node.

A rank tracks its own shard of each DTensor. `find_own_shard` reads the mesh and the placements, and refuses
what cannot be stored: more than one divided dimension, uneven chunks, tensor parallelism. Whether one node
holds the whole tensor is checked in `restore.coordinator`. When a checkpoint is loaded, each rank reads its
shard of the stored tensor, even if that is whole or divided in another way. Placements (``Shard``,
``Replicate``) are torch's: https://docs.pytorch.org/docs/stable/distributed.tensor.html.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.checkpoint.shards import Shards
from elastic_resume.errors import MismatchError, UntrackableError

# Names in torchtitan and Accelerate for dimensions of a mesh whose ranks read the same samples.
NOT_DATA_PARALLEL = {"tp", "cp", "sp", "ep"}


def is_dtensor(value: Any) -> bool:
    """Return whether ``value`` is a DTensor, without the import of its module, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def to_local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, the same object each time; any other tensor as it is.

    `DTensor.to_local` would make a new view at each call, so this reads a private attribute.
    """
    local: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # noqa: SLF001
    return local


def find_own_shard(tensor: Any, path: str) -> tuple[Shards, int]:
    """Return how a DTensor is divided, and the index of this rank's shard. ``path`` is for errors.

    Raises:
        UntrackableError: it is divided in more than one way, or not as torch.chunk does, or not at all, or
            ranks of its mesh read the same samples.

    """
    mesh = tensor.device_mesh
    kinds = {type(placement).__name__ for placement in tensor.placements}
    divided = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    wide = [dim for dim in divided if mesh.size(dim) > 1]
    names = [name for dim, name in enumerate(mesh.mesh_dim_names or ()) if mesh.size(dim) > 1]
    if not divided or kinds - {"Shard", "Replicate"} or len(wide) > 1 or NOT_DATA_PARALLEL & {*names}:
        raise UntrackableError(
            f"{path}: a DTensor with the placements {tensor.placements} on the mesh {mesh} cannot be stored. "
            "Track those that fully_shard() divides over the ranks of a node and replicates over the nodes; "
            "keep other tensors plain. Tensor, context and expert parallelism must have degree 1."
        )
    (mesh_dim,) = wide or divided[:1]  # without a wide dimension the only shard is the whole tensor
    dim = tensor.placements[mesh_dim].dim % tensor.dim()
    shards, index = Shards(dim, tensor.shape[dim], mesh.size(mesh_dim)), mesh.get_local_rank(mesh_dim)
    local = to_local(tensor)
    if tuple(local.shape) != shards.shape(index, tuple(local.shape)):
        raise UntrackableError(
            f"{path}: this rank's part is {list(local.shape)} of {list(tensor.shape)}, and not shard {index} "
            f"of {shards.count} as torch.chunk makes them, so it cannot be stored."
        )
    return shards, index


def is_divided(tensor: Any) -> bool:
    """Return whether other ranks hold other shards of a tensor."""
    return is_dtensor(tensor) and find_own_shard(tensor, "")[0].count > 1


def find_shard_ranks(tensor: Any) -> list[int]:
    """Return the ranks that hold the shards of a DTensor, in the order of the shards.

    `find_own_shard` refuses a tensor with more than one such dimension of its mesh.
    """
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_shard() and tensor.device_mesh.size(mesh_dim) > 1:
            return dist.get_process_group_ranks(tensor.device_mesh.get_group(mesh_dim))
    return [dist.get_rank()]


class LiveShards:
    """Hold one live DTensor for each way of division, as an example for stored tensors divided like it.

    A restore makes an optimizer's state anew, so no live tensor of the same name shows its mesh.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._examples: dict[Shards, Any] = {}
        self._indices: dict[tuple[int, int], int] = {}  # (dimension, number of shards) -> this rank's shard
        for tensor in tensors:
            if is_dtensor(tensor):
                shards, index = find_own_shard(tensor, "")
                self._examples.setdefault(shards, tensor)
                self._indices[shards.dim, shards.count] = index

    def find(self, ref: TensorRef) -> Any:
        """Return a live DTensor that is divided as ``ref`` is; None if ``ref`` or the live model is whole.

        Raises:
            MismatchError: no live DTensor is divided like that.

        """
        if ref.shards is None or not self._examples:
            return None
        if ref.shards not in self._examples:
            raise MismatchError(
                f"{ref.name}: the checkpoint holds it in {ref.shards.count} shards, and its shape is not "
                "that of a parameter, so it cannot be divided anew. Run with as many ranks per node as the "
                "run that wrote it."
            )
        return self._examples[ref.shards]

    def find_name(self, ref: TensorRef) -> str:
        """Return the name of the entry by which this rank learns the dtype and shape of ``ref``.

        That is its own shard, or the first one if no live tensor is divided as ``ref`` is.
        """
        shards = ref.shards
        return ref.stored_names[0 if shards is None else self._indices.get((shards.dim, shards.count), 0)]

    def shape_of(self, ref: TensorRef, peek_tensor: Callable[[str], Tensor]) -> tuple[int, ...]:
        """Return the shape of the whole tensor as it is stored."""
        shape = tuple(peek_tensor(self.find_name(ref)).shape)
        return shape if ref.shards is None else ref.shards.whole_shape(shape)


def read_whole(ref: TensorRef, get_tensor: Callable[[str], Tensor]) -> Tensor:
    """Return a stored tensor, put together from its shards."""
    if ref.shards is None:
        return get_tensor(ref.name)
    return torch.cat([get_tensor(name) for name in ref.stored_names], ref.shards.dim)


def read_own_shard(ref: TensorRef, live: Any, get_tensor: Callable[[str], Tensor]) -> Tensor:
    """Return this rank's shard of a stored tensor, divided as ``live`` is.

    The stored tensor may be whole, or divided in another way. Pieces are cloned: a view would keep the memory
    of all of the stored shard.
    """
    shards, index = find_own_shard(live, ref.name)
    dim, (start, stop) = shards.dim, shards.extent(index)
    if ref.shards is None or ref.shards.dim != dim:
        return read_whole(ref, get_tensor).narrow(dim, start, stop - start).clone()
    parts = []
    for number, name in enumerate(ref.stored_names):
        first, end = ref.shards.extent(number)
        low, high = max(first, start), min(end, stop)
        # Do not read other ranks' empty shards: a restore may not have loaded them.
        if (low, high) == (first, end) and (low < high or number == index):
            parts.append(get_tensor(name))
        elif low < high:
            parts.append(get_tensor(name).narrow(dim, low - first, high - low).clone())
    if not parts:  # this rank's shard is empty
        return get_tensor(ref.stored_names[0]).narrow(dim, 0, 0).clone()
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def make_dtensor(local: Tensor, live: Any) -> Tensor:
    """Return a DTensor whose shard on this rank is ``local``, divided as ``live`` is.

    Their sizes may differ in the dimensions that are not divided.
    """
    shards, _ = find_own_shard(live, "")
    whole = torch.empty(shards.whole_shape(tuple(local.shape)), device="meta")
    made: Tensor = type(live).from_local(
        local, live.device_mesh, live.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made
