"""Hold the `DeviceMesh` of a node's ranks, over which FSDP shards a model.

FSDP and its DTensors keep the mesh for the life of a process, and process groups end with their world. So
the mesh is made without a group, and `NodeMesh.join` gives it the node's group of each world. A worker
that starts before its node joins builds its shards before it has any group. The attributes of a mesh
that this module sets are private.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.ranks.group_connections import GroupConnections

PLACEHOLDER = "elastic_resume.node"  # name of the mesh's group before the first world


class NodeMesh:
    """A mesh of one dimension, "shard", and the process group of the node's ranks behind it.

    The ranks are those that a launcher has started on this node: LOCAL_RANK of LOCAL_WORLD_SIZE.
    """

    current: NodeMesh | None = None
    """This process's mesh, if it has one. Compare meshes by ``is``: two of the same ranks may be equal."""

    def __init__(self) -> None:
        """Make the mesh; until `join` each collective over it raises a RuntimeError.

        Raises:
            ConfigError: LOCAL_WORLD_SIZE is missing or too small for this rank, or no number.

        """
        from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - takes a second

        self.connections = GroupConnections()
        """The connections of the default process group, if `owns_world`."""
        self.owns_world = False
        """Whether the default process group was made for the mesh."""
        self._world: dist.ProcessGroup | None = None
        # With --virtual-local-rank LOCAL_RANK is 0 on every rank.
        rank = os.environ.get(constants.ENV_LOCAL_RANK) or os.environ.get("LOCAL_RANK", "0")
        count = os.environ.get("LOCAL_WORLD_SIZE", "1")
        are_numbers = rank.isdecimal() and count.isdecimal()
        self._local_rank, self._ranks = (int(rank), range(int(count))) if are_numbers else (0, range(0))
        if self._local_rank not in self._ranks:
            raise ConfigError(
                f"er.shard_mesh: LOCAL_RANK is {rank}, and LOCAL_WORLD_SIZE is "
                f"{os.environ.get('LOCAL_WORLD_SIZE', 'not set')}. Set LOCAL_WORLD_SIZE to the number of "
                "ranks on this node, as torchrun does."
            )
        device = "cuda" if torch.cuda.is_available() and dist.is_nccl_available() else "cpu"
        self.mesh: Any = DeviceMesh(
            device, self._ranks, mesh_dim_names=("shard",), _init_backend=False, _rank=self._local_rank
        )
        c10d: Any = distributed_c10d
        group = c10d.ProcessGroup(self._local_rank, len(self._ranks))  # without a backend
        group._set_group_name(PLACEHOLDER)
        c10d._register_process_group(PLACEHOLDER, group)
        self._set_group(group, PLACEHOLDER)

    def is_in_world(self) -> bool:
        """Return whether the group belongs to the present default process group."""
        return self._world is not None and self._world is dist.group.WORLD

    def join(self) -> None:
        """Make the group in the present default process group, with all ranks of the node."""
        self._world = dist.group.WORLD
        first = dist.get_rank() - self._local_rank
        ranks = [first + rank for rank in self._ranks]
        group: Any = dist.new_group(ranks, use_local_synchronization=True)
        self._set_group(group, group.group_name)

    def _set_group(self, group: dist.ProcessGroup, name: str) -> None:
        self.group = group
        self.mesh._dim_group_names = [name]
        self.mesh._pg_registry = {name: group}
