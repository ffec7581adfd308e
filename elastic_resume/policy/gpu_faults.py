"""Classify the errors of GPUs: which are the machine's fault, and which the script's.

A GPU that fails within a collective raises an error that names NCCL, as the death of a peer does. So
`find_gpu_error` looks for what CUDA or ROCm itself has reported. `GpuFault` is what is known of a broken GPU:
its driver's report, through the event ``gpu-fault``, or the error of the worker that used it.

CUDA's words are those of cudaGetErrorString, ROCm's those of hipGetErrorString, NCCL's those of its debug
log. `tests/unit/policy/gpu_error_texts.py` has fifty texts with the source of each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class GpuError(Enum):
    """Whose fault an error of a GPU is."""

    HARDWARE = "hardware"
    """The machine's: memory, bus or links of the GPU are broken, or its driver has lost it."""
    MISSING = "missing"
    """No GPU is there. The machine's fault if the job has trained before, else perhaps its installation's."""
    ACCESS = "access"
    """A kernel did something illegal: the script's fault, or, if it recurs on one node, the machine's."""
    MEMORY = "memory"
    """The GPU's memory is too small for the script."""
    OTHER = "other"
    """The script's or the installation's."""


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A fault of the GPU that a local rank uses; fields are None or empty where they are unknown.

    ``xid`` is the number of NVIDIA's driver for its kind (docs.nvidia.com/deploy/xid-errors).
    ``recovery_action`` is what the driver asks for, such as "GPU reset".
    """

    local_rank: int | None = None
    uuid: str = ""
    xid: int | None = None
    recovery_action: str = ""


# What only CUDA, ROCm, or a library that reports their errors writes.
_GPU_PATTERN = re.compile(
    r"(?:CUDA|HIP)(?: driver)? (?:error|failure)|Triton Error \[(?:CUDA|HIP)\]|unhandled (?:cuda|hip) error|"
    r"(?:CUDA|HIP) out of memory|No (?:CUDA|HIP) GPUs are available|Found no NVIDIA driver|"
    r"(?:CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT|HIPBLAS|ROCBLAS|MIOPEN)_STATUS_|miopenStatus|"
    r"CUDA_ERROR_|cudaError|hipError",
    re.IGNORECASE,
)
# The first error with a match counts, so what proves a broken GPU stands first.
_ERROR_PATTERNS = {
    error: re.compile("|".join(patterns), re.IGNORECASE)
    for error, patterns in {
        GpuError.HARDWARE: (
            r"\becc\b", "ECC_?(UNCORRECTABLE|NotCorrectable)", "nvlink", "fallen off the bus", "GPU is lost",
            "hardware.stack.error", "hardware error", "system not yet initialized", "SYSTEM_NOT_READY",
        ),
        GpuError.MISSING: (
            "GPUs are available", "no (CUDA|ROCm)-capable device", "No_?Device", "invalid device ordinal",
            "busy or unavailable", "no NVIDIA driver",
        ),
        GpuError.ACCESS: (
            "illegal memory access", "ILLEGAL_ADDRESS", "device-side assert", "misaligned address",
            "illegal instruction", "invalid program counter", "launch.fail",
            "operation not supported on global/shared address space",
        ),
        GpuError.MEMORY: ("out.of.memory", "ALLOC_FAILED"),
        GpuError.OTHER: ("",),
    }.items()
}  # fmt: skip


def find_gpu_error(text: str) -> GpuError | None:
    """Return which error of a GPU an exception's text reports; None if it reports none."""
    if _GPU_PATTERN.search(text) is None:
        return None
    return next(error for error, pattern in _ERROR_PATTERNS.items() if pattern.search(text))


def summarize_error_text(text: str) -> str:
    """Return the first line of an exception's text and, if it stands elsewhere, the line about the GPU."""
    lines = text.strip().splitlines() or [""]
    named = [line.strip() for line in lines[1:] if _GPU_PATTERN.search(line)]
    error = find_gpu_error(text)
    if error is None or not named or find_gpu_error(lines[0]) is error:
        return lines[0]
    # NCCL tells the cause last.
    return f"{lines[0][:200]}: {next(line for line in reversed(named) if find_gpu_error(line) is error)}"
