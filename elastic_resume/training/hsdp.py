"""Train a model that is sharded over the ranks of each node and replicated over the nodes (HSDP), with FSDP2.

`shard_mesh` is the mesh for ``fully_shard``. `replicate` averages the gradients over the nodes, in FSDP's
all-reduce hook: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. So the ranks of a
node hold one replica of the model together, and a node stays the unit of loss and recovery.

FSDP's modules outlive their world: `reset` drops what an interrupted step has left in them, and `reconnect`
gives them the node's group of the next world. Both use private attributes of torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_resume.errors import UsageError
from elastic_resume.ranks import collectives
from elastic_resume.ranks.node_mesh import NodeMesh
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.state.dtensors import is_divided


def shard_mesh() -> Any:
    """Return a mesh of this node's ranks, of one dimension, for ``fully_shard(block, mesh=mesh)``.

    Call it before `er.resume`; each call returns the same mesh. It joins the default process group first, as
    torchrun's environment says, unless the script has done so. Call `Run.replicate` after `er.resume`, to
    average the gradients over the nodes.

    A worker that starts before its node joins has no process group yet. It can build shards, and a collective
    before `er.resume` raises an error.
    """
    return collectives.make_node_mesh()


def find_survivors() -> list[Any]:
    """Return this process's FSDP modules; raise UsageError if one of them cannot outlive its world."""
    modules = find_fsdp_modules()
    for module in modules:
        if not hasattr(module, "reset_iter_state"):
            raise UsageError(
                "run.restartable: a sharded model needs torch 2.13 or newer, and this is "
                f"{torch.__version__}. Train without run.restartable: then the processes are restarted."
            )
        node_mesh = NodeMesh.current
        if node_mesh is None or any(info.mesh is not node_mesh.mesh for info in _list_mesh_infos(module)):
            raise UsageError(
                "run.restartable: the model is sharded over a mesh of the script, whose groups end with "
                "their world. Shard it with fully_shard(..., mesh=er.shard_mesh()), or train without "
                "run.restartable: then the processes are restarted."
            )
    return modules


def reset(modules: Iterable[Any]) -> str:
    """Drop what an interrupted step has left: gathered parameters, unfinished reductions, gradients.

    Return why the models cannot be used again, or "".
    """
    for module in modules:
        state = module._get_fsdp_state()
        if state._is_root:  # None before its first forward pass
            try:
                module.reset_iter_state()
            except (RuntimeError, AttributeError) as error:  # AttributeError: in its first forward pass
                return f"an unfinished step of its sharded model cannot be undone ({error})"
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:  # torch before 2.15 adds the next gradients to these
                if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
                    gathered.grad = None
                if parameter.unsharded_accumulated_grad is not None:
                    parameter.unsharded_accumulated_grad = None
    return ""


def reconnect(modules: Iterable[Any]) -> None:
    """Let FSDP models communicate in the node's group of this world, if they were sharded over its mesh."""
    node_mesh = NodeMesh.current
    for module in modules:
        for info in _list_mesh_infos(module):
            if node_mesh is not None and info.mesh is node_mesh.mesh:
                info.shard_process_group = node_mesh.group


def find_fsdp_modules() -> list[Any]:
    """Return the FSDP modules of all models in this process, also of those that er.resume() was not given.

    It looks at each object, which may take 0.1 s: call it once, and not while the other ranks wait.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    types = set(fsdp.FSDPModule.__subclasses__()) if fsdp else set()  # fully_shard() makes them
    return [item for item in gc.get_objects() if type(item) in types] if types else []


def _list_mesh_infos(module: Any) -> list[Any]:
    """Return the private objects in which an FSDP module keeps its mesh and group; [] before torch 2.13."""
    groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", [])
    infos = [info for group in groups for info in (group.mesh_info, group.post_forward_mesh_info)]
    return [info for info in infos if info is not None]


def replicate(model: nn.Module, context: RankContext, *, was_sharded: bool) -> None:
    """Average the gradients of an FSDP model over the nodes, after FSDP's reduce-scatter within the node.

    ``was_sharded``: whether `er.resume` was given a sharded model.

    Raises:
        UsageError: no part of the model was given to fully_shard(), or not all, or too late, or FSDP
            replicates it already.

    """
    fsdp_modules = _check_replicable(model, was_sharded=was_sharded)
    # The ranks that hold the same shards, one on each node.
    ranks = [rank for rank, local in enumerate(context.local_rank_by_rank) if local == context.local_rank]
    group: Any = None
    if len(ranks) > 1:
        group = context.collectives.new_group(ranks, use_local_synchronization=True)

    def average(gradients: Tensor) -> None:
        if group is not None:
            dist.all_reduce(gradients, group=group)
            gradients.div_(len(ranks))

    for module in fsdp_modules:
        module.set_all_reduce_hook(average)


def _check_replicable(model: nn.Module, *, was_sharded: bool) -> list[Any]:
    """Return the FSDP modules of a model that `replicate` can take; raise UsageError for another one."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # its import takes a second
    fsdp_modules = [module for module in model.modules() if fsdp and isinstance(module, fsdp.FSDPModule)]
    if not fsdp_modules:
        raise UsageError(
            "run.replicate: no part of the model was given to fully_shard(). Call fully_shard(model, "
            "mesh=er.shard_mesh()) before er.resume(), or use run.ddp(model) for a model that every rank "
            "holds whole."
        )
    if not was_sharded and any(map(is_divided, model.parameters())):
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
    return fsdp_modules
