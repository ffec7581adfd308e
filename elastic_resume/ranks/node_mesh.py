"""Hold the `DeviceMesh` of a node's ranks, over which FSDP shards a model.

FSDP and its DTensors keep the mesh for the life of a process. Process groups end with their world. So a
process that stays gets a new group for its node in each world, and `NodeMesh.rejoin` lets the mesh lead to
it: torch looks a mesh's group up by its name.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic_resume.ranks.group_connections import GroupConnections


class NodeMesh:
    """This process's mesh, of one dimension, "shard", and the group behind it."""

    current: NodeMesh | None = None

    def __init__(self, connections: GroupConnections, *, owns_world: bool) -> None:
        """Make a group of this node's ranks in the default process group, and a mesh of it.

        ``connections`` are those of the default group. ``owns_world``: it was made for this mesh.
        """
        from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - takes a second

        self.world = dist.group.WORLD
        self.connections = connections
        self.owns_world = owns_world
        with connections.record():
            self.group = _new_node_group()
        device = "cuda" if torch.cuda.is_available() and dist.is_nccl_available() else "cpu"
        self.mesh: Any = DeviceMesh.from_group(self.group, device, mesh_dim_names=("shard",))

    def rejoin(self) -> None:
        """Make the group again, in a new default process group, and let the mesh lead to it.

        The global ranks in the mesh's text stay those of the first world; torch communicates by the group.
        """
        self.world = dist.group.WORLD
        self.group = _new_node_group()
        (name,) = self.mesh._dim_group_names  # noqa: SLF001 - not public
        if name != self.group.group_name:
            distributed_c10d._register_process_group(name, self.group)  # noqa: SLF001 - not public
        self.mesh._pg_registry[name] = self.group  # noqa: SLF001 - not public


def _new_node_group() -> dist.ProcessGroup:
    """Make a group of the ranks that torchrun has started on this node (LOCAL_RANK, LOCAL_WORLD_SIZE)."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = dist.get_rank() - int(os.environ.get("LOCAL_RANK", "0"))
    group: dist.ProcessGroup = dist.new_group(
        list(range(first, first + count)), use_local_synchronization=True
    )
    return group
