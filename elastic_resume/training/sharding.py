"""Train a model that is sharded over the ranks of each node and replicated over the nodes, with FSDP2.

`shard_mesh` is for ``fully_shard``; `replicate` sums the gradients over nodes, in FSDP's all-reduce hook:
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. So a node holds one whole copy of the
model, which is this project's unit of loss and recovery.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from elastic_resume import constants
from elastic_resume.errors import UsageError
from elastic_resume.ranks import collectives
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.rank_context import RankContext


def shard_mesh() -> Any:
    """Return the mesh of this node's ranks, for ``fully_shard(block, mesh=er.shard_mesh())``.

    It joins the process group of torchrun's environment, unless the script has done so. The mesh has one
    dimension. Call `Run.replicate` afterwards: it sums gradients over the nodes.

    Raises:
        UsageError: the process is a standby, whose node has no ranks yet.

    """
    if constants.ENV_STANDBY in os.environ:
        raise UsageError(
            "er.shard_mesh(): this node has no ranks yet, because it prepares to join. A sharded model needs "
            "them at once."
        )
    return collectives.make_node_mesh()


def replicate(model: nn.Module, context: RankContext, joined: Collectives) -> None:
    """Average the gradients of an FSDP model over the nodes, after its reduce-scatter within the node.

    Raises:
        UsageError: no part of the model was given to fully_shard(), or FSDP replicates it already.

    """
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - takes a second

    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    if not parts:
        raise UsageError(
            "run.replicate: no part of the model was given to fully_shard(). Call fully_shard(model, "
            "mesh=er.shard_mesh()) before er.resume(), or use run.ddp(model) for a model that every rank "
            "holds whole."
        )
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            raise UsageError(
                f"run.replicate: the parameter {name} is not sharded, so its gradients would be summed "
                "nowhere. Call fully_shard() on the whole model too, without ignored_params."
            )
        if mesh.size() > mesh.size(mesh.ndim - 1):
            raise UsageError(
                f"run.replicate: {name} is on the mesh {mesh}, over which FSDP replicates already. Leave "
                "this call out, or shard over er.shard_mesh()."
            )
    ranks = [rank for rank, local in enumerate(context.local_rank_by_rank) if local == context.local_rank]
    if len(ranks) == 1:
        return
    group = joined.new_group(ranks, use_local_synchronization=True)

    def average(gradients: Tensor) -> None:
        dist.all_reduce(gradients, group=group)
        gradients.div_(len(ranks))

    for part in parts:
        part.set_all_reduce_hook(average)
