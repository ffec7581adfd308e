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
    """No GPU can be used. The machine's fault if it recurs after the job has trained, else perhaps not."""
    ACCESS = "access"
    """A kernel did something illegal: the script's fault, or, if it recurs on one node, the machine's."""
    MEMORY = "memory"
    """The GPU's memory is too small for the script."""
    OTHER = "other"
    """The script's or the installation's."""


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A fault of the GPU that a local rank uses; fields are None or empty where they are unknown.

    ``index`` counts the GPUs of the machine, as nvidia-smi does. ``xid`` is the number of NVIDIA's driver for
    its kind (docs.nvidia.com/deploy/xid-errors). ``recovery_action`` is what the driver asks for, such as
    "GPU reset".
    """

    local_rank: int | None = None
    index: int | None = None
    uuid: str = ""
    xid: int | None = None
    recovery_action: str = ""

    @property
    def is_reported(self) -> bool:
        """Whether the driver reports it, and not only the text of an error."""
        return self.xid is not None or bool(self.recovery_action)


# The first error with a match counts, so what proves a broken GPU stands first.
_ERROR_PATTERNS = {
    error: re.compile("|".join(patterns), re.IGNORECASE | re.DOTALL)
    for error, patterns in {
        GpuError.HARDWARE: (
            "uncorrectable (ecc|nvlink) error", "peer gpu memory over nvlink", "[ds]ram ecc failure",
            r"reason ?: ?ecc\b", "gpu is lost",
        ),
        GpuError.MISSING: (
            "no (cuda|hip) gpus are available", "no (cuda|rocm)-capable device", "no gpus found",
            r"cuda-capable device(s|\(s\)) (is/)?are busy", "invalid device ordinal",
            "found no nvidia driver", "system not yet initialized", r"hiperrorno?(invalid)?device\b",
        ),
        GpuError.ACCESS: (
            # Nearly every error of CUDA ends with "to enable device-side assertions".
            "illegal memory access", "device-side assert triggered", "misaligned address",
            "illegal instruction was", "invalid program counter", "unspecified launch failure",
            "hardware stack error", "global/shared address space", "memory access fault by gpu",
            "hw exception by gpu", "hsa_status_error_(exception|memory_|illegal)",
        ),
        GpuError.MEMORY: (
            "(cuda|hip) out of memory", "(cuda|hip)( driver)? error: out of memory",
            r"failure (\d+ )?'out of memory'", "failed to (cuda|hip) (calloc|malloc)",
            "(blas|cudnn)_status_alloc_failed", "nvml_success == .*cudacachingallocator",
        ),
        GpuError.OTHER: (
            "(cuda|hip)( driver| unknown)? (error|failure)", r"triton error \[", "cudnn( frontend)? error",
            "unhandled (cuda|hip) error", "miopenstatus", "nvidia driver on your system is too old",
            "cuda driver initialization failed", "error from (cuda|hip)getdevicecount",
        ),
    }.items()
}  # fmt: skip
# Other texts quote an error, perhaps of another rank.
_TYPES = frozenset({"RuntimeError", "AcceleratorError", "OutOfMemoryError", "DistBackendError"})
_BEGINNING = re.compile(
    r"(cuda|hip)( driver| unknown)? (error|failure)|nccl error in:|(cuda|hip) out of memory|triton error \[|"
    r"no (cuda|hip) gpus are available|found no nvidia driver|the nvidia driver on your system|"
    r"cuda driver initialization|(unexpected )?error from (cuda|hip)getdevicecount|cudnn( frontend)? error|"
    r"miopenstatus|nvml_success ==",
    re.IGNORECASE,
)
# torch raises so in the main thread what a thread of this process has raised.
_OF_THREAD = re.compile(r"Caught \w+ in .*^(\w+): (.*)", re.DOTALL | re.MULTILINE)
_NCCL_DETAIL = re.compile(r"^Last error:\s*(\S.*)", re.MULTILINE)


def find_gpu_error(exception_type: str, text: str) -> GpuError | None:
    """Return which error of its own GPU an exception of a worker reports; None if it reports none."""
    of_thread = _OF_THREAD.match(text)
    if of_thread:
        exception_type, text = of_thread[1], of_thread[2]
    if exception_type.rpartition(".")[2] not in _TYPES or not _BEGINNING.match(text):
        return None
    return next((error for error, pattern in _ERROR_PATTERNS.items() if pattern.search(text)), None)


def summarize_error_text(text: str) -> str:
    """Return the first line of an exception's text; before it the cause that NCCL names further below."""
    first = text.strip().partition("\n")[0]
    detail = _NCCL_DETAIL.search(text) if first.startswith("NCCL error in:") else None
    return f"{detail[1][:200]} ({first})" if detail else first
