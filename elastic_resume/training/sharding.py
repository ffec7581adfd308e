"""Train a model that is sharded over the ranks of each node and replicated over the nodes (HSDP), with FSDP2.

`shard_mesh` is the mesh for ``fully_shard``. `replicate` averages the gradients over the nodes, in FSDP's
all-reduce hook: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. So the ranks of a
node hold one replica of the model together, and a node stays the unit of loss and recovery.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from elastic_resume import constants
from elastic_resume.errors import UsageError
from elastic_resume.ranks import collectives
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.state.dtensors import is_divided


def shard_mesh() -> Any:
    """Return a mesh of this node's ranks, of one dimension, for ``fully_shard(block, mesh=mesh)``.

    Call it before `er.resume`; each call returns the same mesh. It joins the default process group first, as
    torchrun's environment says, unless the script has done so. Call `Run.replicate` after `er.resume`, to
    average the gradients over the nodes.

    Raises:
        UsageError: the process is a standby, whose node has no ranks yet.

    """
    if constants.ENV_STANDBY in os.environ:
        raise UsageError(
            "er.shard_mesh(): this node has no ranks yet, because it prepares to join. A sharded model needs "
            "them at once."
        )
    return collectives.make_node_mesh()


def replicate(model: nn.Module, context: RankContext, *, is_saved_in_shards: bool) -> None:
    """Average the gradients of an FSDP model over the nodes, after FSDP's reduce-scatter within the node.

    ``is_saved_in_shards``: whether a tracked model was sharded when `er.resume` was called.

    Raises:
        UsageError: no part of the model was given to fully_shard(), or too late, or FSDP replicates it
            already.

    """
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - takes a second

    fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not fsdp_modules:
        raise UsageError(
            "run.replicate: no part of the model was given to fully_shard(). Call fully_shard(model, "
            "mesh=er.shard_mesh()) before er.resume(), or use run.ddp(model) for a model that every rank "
            "holds whole."
        )
    if not is_saved_in_shards and any(map(is_divided, model.parameters())):
        raise UsageError(
            "run.replicate: the model was sharded after er.resume(), which saves the tensors that it had "
            "before. Call fully_shard() first, and pass that model to er.resume()."
        )
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            raise UsageError(
                f"run.replicate: the parameter {name} is not sharded, so nothing would average its "
                "gradients. Call fully_shard() on the whole model too, without ignored_params."
            )
        if mesh.size() > mesh.size(mesh.ndim - 1):  # FSDP shards over the last dimension of a mesh
            raise UsageError(
                f"run.replicate: {name} is on the mesh {mesh}, over which FSDP replicates already. Leave "
                "this call out, or shard over er.shard_mesh()."
            )
    # One rank of each node: those that hold the same shards.
    ranks = [rank for rank, local in enumerate(context.local_rank_by_rank) if local == context.local_rank]
    if len(ranks) == 1:
        return
    group = context.collectives.new_group(ranks, use_local_synchronization=True)

    def average(gradients: Tensor) -> None:
        dist.all_reduce(gradients, group=group)
        gradients.div_(len(ranks))

    for module in fsdp_modules:
        module.set_all_reduce_hook(average)
