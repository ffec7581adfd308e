"""Hold the `DeviceMesh` of a node's ranks, over which FSDP shards a model.

FSDP and its DTensors keep the mesh for the life of a process, and process groups end with their world. So a
process that stays, or starts before its node joins, gets the node's group in each world anew.
`NodeMesh.rejoin` lets the mesh lead to it, by attributes of a mesh that are not public.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic_resume.ranks.group_connections import GroupConnections

PLACEHOLDER: Any = "elastic_resume.node"


class NodeMesh:
    """A mesh of one dimension, "shard", and the process group of the node's ranks behind it."""

    current: NodeMesh | None = None
    """This process's newest."""

    def __init__(self, connections: GroupConnections, *, owns_world: bool) -> None:
        """Make the group in the default process group, and the mesh.

        ``connections`` are those of the default process group. ``owns_world``: that was made for this mesh.
        Without a default process group FSDP can build shards, and each collective raises a RuntimeError.
        """
        from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - takes a second

        self.connections = connections
        self.owns_world = owns_world
        self.world = dist.group.WORLD
        device = "cuda" if torch.cuda.is_available() and dist.is_nccl_available() else "cpu"
        if self.world is not None:
            with connections.record():
                self.group = _new_node_group()
            self.mesh: Any = DeviceMesh.from_group(self.group, device, mesh_dim_names=("shard",))
            return
        local_rank, count = _read_place()
        c10d: Any = distributed_c10d
        self.group = c10d.ProcessGroup(local_rank, count)  # without a backend; this is not public either
        self.group._set_group_name(PLACEHOLDER)
        c10d._register_process_group(PLACEHOLDER, self.group)
        self.mesh = DeviceMesh(
            device, range(count), mesh_dim_names=("shard",), _init_backend=False, _rank=local_rank
        )
        self.mesh._dim_group_names = [PLACEHOLDER]

    def is_in_world(self) -> bool:
        """Return whether the group belongs to the present default process group."""
        return self.world is not None and self.world is dist.group.WORLD

    def rejoin(self) -> None:
        """Make the group in the present default process group. The mesh's text keeps its old ranks."""
        self.world = dist.group.WORLD
        self.group = _new_node_group()
        self.mesh._dim_group_names = [self.group.group_name]
        self.mesh._pg_registry = {self.group.group_name: self.group}


def _new_node_group() -> dist.ProcessGroup:
    local_rank, count = _read_place()
    first = dist.get_rank() - local_rank
    ranks = list(range(first, first + count))
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group


def _read_place() -> tuple[int, int]:
    """Return the local rank and the number of ranks that a launcher has started on this node."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
