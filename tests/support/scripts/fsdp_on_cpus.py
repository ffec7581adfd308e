"""Let Accelerate use FSDP2 on CPUs: it does so on accelerators only, and wraps the model in DDP on CPUs."""

from __future__ import annotations

import os
from typing import Any

from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def allow() -> None:
    """Let an accelerator with an FSDP plugin choose FSDP, as it does with several GPUs."""
    init = AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_fsdp


def shard_over_each_node() -> ParallelismConfig:
    """Return the degrees of a model that is sharded over the ranks of each node."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // ranks
    return ParallelismConfig(dp_replicate_size=nodes, dp_shard_size=ranks)
