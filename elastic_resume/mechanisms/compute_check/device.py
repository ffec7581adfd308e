"""Name the device of a model, and say whether its computation can be compared."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume.mechanisms.compute_check.plain_state import find_iterator
from elastic_resume.mechanisms.compute_check.request import NotCheckable, TensorFormat


def unwrap(ddp: DistributedDataParallel) -> nn.Module:
    """Return the model in DDP, without torch.compile."""
    module: nn.Module = getattr(ddp.module, "_orig_mod", ddp.module)
    return module


def find_obstacle(ddp: DistributedDataParallel) -> None:
    """Look for what no check can repeat.

    Raises:
        NotCheckable: there is such a thing.

    """
    module = unwrap(ddp)
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) != 1:
        raise NotCheckable(f"its parameters are on {len(devices)} devices")
    if getattr(ddp, "mixed_precision", None) is not None:
        raise NotCheckable("DDP's mixed_precision keeps other parameters than the optimizer's")
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        raise NotCheckable("SyncBatchNorm lets ranks wait for each other in the forward pass")
    find_iterator(module)
    for name, parameter in module.named_parameters():
        TensorFormat.of(parameter.detach(), name)


def describe_device(device: torch.device) -> str:
    """Return all by which the rounding of two devices may differ."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_read_cpu_model()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"


def find_gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU as nvidia-smi prints it; empty for a CPU, or if it is unknown."""
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid else ""


@functools.cache
def _read_cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""
