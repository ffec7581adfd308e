"""Error texts of DDP workers on GPUs: where each was seen or is defined, and what it says about the fault.

The wording is that of torch, NCCL, CUDA and ROCm; versions, ranks, addresses, hosts and times may be ours. A
text that no report shows whole joins a format and a string; its source names where one or both are defined.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CHARS = 400


@dataclass(frozen=True, slots=True)
class ErrorText:
    """The last words of a worker."""

    kind: str
    """``exception``: Python printed ``type: message``. ``signal``: stderr before SIGABRT."""
    text: str
    source: str
    """An issue's or a page's address, or ``repository:path``; several are joined by a space."""
    gpu_error: str
    """``hardware``, ``missing``, ``access``, ``memory``, ``other``; empty if no GPU is at fault."""
    is_secondary: bool
    """Whether a peer's failure caused it."""
    fault_of: str
    """``machine``, ``script`` (or its installation) or ``peer``."""
    next: str
    """What follows the first time: ``node excluded``, ``restart`` or ``restart, hint``."""


def _classify(
    gpu_error: str,
    fault_of: str,
    then: str,
    *,
    raised: dict[str, str] | None = None,
    aborted: dict[str, str] | None = None,
) -> tuple[ErrorText, ...]:
    """Make the rows of a class; ``raised`` and ``aborted`` map each source to its text."""
    rows = [("exception", row) for row in (raised or {}).items()]
    rows += [("signal", row) for row in (aborted or {}).items()]
    return tuple(
        ErrorText(kind, text[:MAX_CHARS], source, gpu_error, fault_of == "peer", fault_of, then)
        for kind, (source, text) in rows
    )


_TORCH = "pytorch/pytorch:torch/csrc/distributed/c10d/"
_C10 = "pytorch/pytorch:c10/cuda/"
_HSA = "ROCm/ROCR-Runtime:runtime/hsa-runtime/core/runtime/runtime.cpp"
_STACK_ERROR_PAGE = (
    "https://docs.rs/crseo-sys/latest/aarch64-unknown-linux-gnu/"
    "constant.cudaError_cudaErrorHardwareStackError.html"
)
_ASYNCHRONOUS = (
    "kernel errors might be asynchronously reported at some other API call, "
    "so the stacktrace below might be incorrect."
)
_CUDA_LINES = f"""
CUDA {_ASYNCHRONOUS}
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
_HIP_LINES = f"""
HIP {_ASYNCHRONOUS}
For debugging consider passing AMD_SERIALIZE_KERNEL=3
Compile with `TORCH_USE_HIP_DSA` to enable device-side assertions.
"""
_NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: "
    "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, "
)
_NCCL_CUDA = f"""{_NCCL}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
"""
_NCCL_SYSTEM = f"""{_NCCL}unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\x20
Last error:
"""
_NCCL_REMOTE = f"""{_NCCL}remote process exited or there was a network error, NCCL version 2.26.2
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."""
_WATCHDOG_ENDS = (
    "[rank1]:[E817 10:00:00.000000000 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 1] "
    "Process group watchdog thread terminated with exception: "
)

_HARDWARE = _classify(
    "hardware",
    "machine",
    "node excluded",
    raised={
        "https://github.com/huggingface/accelerate/issues/1192": (
            f"RuntimeError: CUDA error: uncorrectable ECC error encountered{_CUDA_LINES}"
        ),
        f"{_TORCH}NCCLUtils.cpp NVIDIA/nccl:src/include/checks.h": (
            f"{_NCCL_CUDA}Cuda failure 'uncorrectable ECC error encountered'"
        ),
        # One broken link can end every worker of the node.
        "https://github.com/MIC-DKFZ/nnUNet/issues/1519": (
            f"RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution{_CUDA_LINES}"
        ),
        "https://github.com/ultralytics/ultralytics/issues/24536": (
            "RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware "
            f"error{_CUDA_LINES}"
        ),
    },
    aborted={
        # The watchdog may abort the process before Python reports an exception.
        "https://github.com/pytorch/pytorch/issues/113128": (
            f"{_WATCHDOG_ENDS}CUDA error: uncorrectable ECC error encountered\nCompile with "
            "`TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
        ),
        f"{_HSA}#VMFaultHandler": (
            "Memory access fault by GPU node-4 (Agent handle: 0x5581a0) on address 0x7f0000000000. Reason: "
            "DRAM ECC failure.\n"
        ),
        f"{_HSA}#HwExceptionHandler": "HW Exception by GPU node-4 (Agent handle: 0x5581a0) reason :ECC\n",
    },
)

_MISSING = _classify(
    "missing",
    "machine",
    "restart, hint",
    raised={
        # The service that configures NVLink (Fabric Manager) does not run.
        "https://github.com/NVIDIA/nccl/issues/1769": (
            f"{_NCCL_CUDA}Cuda failure 802 'system not yet initialized'"
        ),
        f"https://github.com/Thinklab-SJTU/Bench2Drive/issues/75 {_C10}CUDAFunctions.cpp": (
            "RuntimeError: No CUDA GPUs are available"
        ),
        "https://github.com/pytorch/pytorch/issues/100691": (
            f"RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable{_CUDA_LINES}"
        ),
        f"https://github.com/meta-pytorch/tritonparse/issues/176 {_C10}CUDAMiscFunctions.cpp": (
            "torch.AcceleratorError: CUDA error: invalid device ordinal\nGPU device may be out of range, do "
            f"you have enough GPUs?{_CUDA_LINES}"
        ),
        f"https://github.com/runpod/containers/issues/56 {_C10}CUDAFunctions.cpp": (
            "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU "
            "and installed a driver from http://www.nvidia.com/Download/index.aspx"
        ),
        "https://github.com/ROCm/hip/issues/3799": "RuntimeError: No HIP GPUs are available",
        "https://github.com/ROCm/TheRock/issues/745 ROCm/clr:hipamd/src/hip_error.cpp": (
            f"RuntimeError: HIP error: no ROCm-capable device is detected{_HIP_LINES}"
        ),
    },
)

_ACCESS = _classify(
    "access",
    "script",
    "restart, hint",
    raised={
        # CUDA's documentation names a corrupt or overflown stack, which a kernel of the script causes.
        f"{_STACK_ERROR_PAGE} {_C10}CUDAException.cpp": (
            f"RuntimeError: CUDA error: hardware stack error{_CUDA_LINES}"
        ),
        f"https://github.com/pytorch/pytorch/issues/131755 {_TORCH}NCCLUtils.cpp": (
            f"{_NCCL_CUDA}Cuda failure 700 'an illegal memory access was encountered'"
        ),
        "https://github.com/karpathy/nanoGPT/issues/470": (
            f"RuntimeError: CUDA error: device-side assert triggered{_CUDA_LINES}"
        ),
        f"https://github.com/NVIDIA/TensorRT-LLM/issues/11313 {_C10}CUDAException.cpp": (
            "torch.AcceleratorError: CUDA error: an illegal instruction was encountered\nSearch for "
            "`cudaErrorIllegalInstruction' in "
            "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
            f"information.{_CUDA_LINES}"
        ),
        "https://github.com/pytorch/pytorch/issues/103271": (
            "RuntimeError: Triton Error [CUDA]: misaligned address"
        ),
        "https://github.com/ROCm/legacy-rocm-build/issues/5742": (
            "torch.AcceleratorError: HIP error: an illegal memory access was encountered\nSearch for "
            "`hipErrorIllegalAddress' in https://rocm.docs.amd.com/projects/HIP/en/latest/index.html for "
            f"more information.{_HIP_LINES}"
        ),
    },
    aborted={
        "https://github.com/pytorch/pytorch/issues/152780": (
            f"{_WATCHDOG_ENDS}CUDA error: an illegal memory access was encountered\nCompile with "
            "`TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
        ),
        "https://github.com/meta-llama/llama-cookbook/issues/290": (
            "terminate called after throwing an instance of 'std::runtime_error'\n  what():  [Rank 0] NCCL "
            f"watchdog thread terminated with exception: CUDA error: unspecified launch failure{_CUDA_LINES}"
        ),
        # Torch 2.11 prints "CUDA error" on ROCm too.
        "https://github.com/ROCm/legacy-rocm-build/issues/6003": (
            "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  CUDA error: "
            "an illegal memory access was encountered\nSearch for `hipErrorIllegalAddress' in "
            "https://rocm.docs.amd.com/projects/HIP/en/latest/index.html for more information.\n"
        ),
        f"https://github.com/ROCm/legacy-rocm-build/issues/4554 {_HSA}": (
            "Memory access fault by GPU node-1 (Agent handle: 0x5581a0) on address 0x7f0000000000. Reason: "
            "Page not present or supervisor privilege.\n"
        ),
        # Several processes of a node print it, all with the number of the same GPU.
        f"https://github.com/ROCm/legacy-rocm-build/issues/4021 {_HSA}": (
            "HW Exception by GPU node-9 (Agent handle: 0x5581a0) reason :GPU Hang\n"
        ),
        "https://github.com/deepspeedai/DeepSpeed/issues/6637": (
            ":0:rocdevice.cpp            :2984: 1000000000 us: [pid:1000  tid:0x7f0000000000] Callback: "
            "Queue 0x7f0000000000 aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation "
            "resulted in a hardware exception. code: 0x1016\n"
        ),
    },
)

_MEMORY = _classify(
    "memory",
    "script",
    "restart, hint",
    raised={
        "https://github.com/OEvortex/unsloth/issues/20": (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 5 has a total "
            "capacity of 79.19 GiB of which 2.06 MiB is free. Including non-PyTorch memory, this process "
            "has 75.45 GiB memory in use."
        ),
        "https://github.com/QwenLM/Qwen3/issues/873": (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
        ),
        # NCCL warns of the CUDA failure first, and of this second; torch shows the newest warning only.
        "https://github.com/THUDM/slime/issues/956 https://github.com/NVIDIA/nccl/issues/1235": (
            f"{_NCCL_CUDA}Failed to CUDA calloc 6291456 bytes"
        ),
        # Torch ran out of memory, then failed to ask NVML who uses it.
        "https://github.com/fal-ai/fal/pull/478": (
            "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
            '"../c10/cuda/CUDACachingAllocator.cpp":830, please report a bug to PyTorch. '
        ),
        "https://github.com/kyuz0/amd-strix-halo-image-video-toolboxes/issues/3": (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total "
            "capacity of 128.00 GiB of which 780.24 MiB is free. Of the allocated memory 57.70 GiB is "
            "allocated by PyTorch"
        ),
        "https://github.com/ROCm/TheRock/issues/1708": (
            "RuntimeError: CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"
        ),
    },
)

_OTHER = _classify(
    "other",
    "script",
    "restart",
    raised={
        # A matter of the installation (IMEX, Fabric Manager, a container without their devices).
        "https://github.com/pytorch/pytorch/pull/177472": (
            f"{_NCCL_CUDA}Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA "
            "error 401 'the operation cannot be performed in the present state'."
        ),
        "https://github.com/pytorch/pytorch/issues/149845": (
            f"RuntimeError: CUDA error: no kernel image is available for execution on the device{_CUDA_LINES}"
        ),
        f"{_C10}CUDAFunctions.cpp": (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update "
            "your GPU driver by downloading and installing a new version from the URL: "
            "http://www.nvidia.com/Download/index.aspx"
        ),
        "https://github.com/pytorch/pytorch/issues/124262": (
            "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, "
            "opa, opb, m, n, k, &falpha, a, CUDA_R_16BF, lda, b, CUDA_R_16BF, ldb, &fbeta, c, CUDA_R_16BF, "
            "ldc, CUDA_R_32F, CUBLAS_GEMM_DEFAULT_TENSOR_OP)`"
        ),
        "https://github.com/MIC-DKFZ/nnUNet/issues/1739": (
            "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"
        ),
        # A GPU that fell off the bus ends a worker so too (proteneer/timemachine#1203).
        "https://github.com/pytorch/pytorch/issues/170045": f"{_NCCL_CUDA}Cuda failure 999 'unknown error'",
        f"https://github.com/ROCm/rccl/issues/1454 {_TORCH}NCCLUtils.cpp": (
            f"{_NCCL_CUDA}Cuda failure 'invalid argument'"
        ),
    },
    aborted={
        "https://github.com/NVIDIA/physicsnemo/issues/107": (
            "[E ProcessGroupNCCL.cpp:830] [Rank 10] NCCL watchdog thread terminated with exception: CUDA "
            "error: operation not permitted when stream is capturing\n"
        ),
    },
)

_PEER = _classify(
    "",
    "peer",
    "restart",
    raised={
        "https://github.com/NVIDIA/nccl/issues/2076": (
            f"{_NCCL_REMOTE}\nLast error:\nsocketProgressOpt: Call to recv from 10.0.0.2<33759> failed : "
            "Connection reset by peer"
        ),
        "https://github.com/NVIDIA/nccl/issues/934": _NCCL_REMOTE,
        # NCCL reports the loss of a peer as its own internal error.
        "https://github.com/NVIDIA/nccl/issues/1029 https://github.com/NVIDIA/nccl/issues/795": (
            f"{_NCCL}internal error - please report this issue to the NCCL developers, NCCL version 2.18.3\n"
            "ncclInternalError: Internal check failed.\nLast error:\nSocket recv failed while polling for "
            "opId=0x7f0000000000"
        ),
        "https://github.com/open-mmlab/mmdetection/issues/12392": (
            "RuntimeError: NCCL communicator was aborted on rank 1.  Original reason for failure was: [Rank "
            "1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=25, OpType=ALLREDUCE, "
            "Timeout(ms)=1800000) ran for 1809553 milliseconds before timing out."
        ),
        "https://github.com/hkproj/pytorch-transformer-distributed/issues/1": (
            f"{_NCCL_SYSTEM}socketStartConnect: Connect to 10.0.0.2<52822> failed : No route to host"
        ),
        "https://github.com/pytorch/pytorch/issues/131781": (
            "torch.distributed.DistBackendError: [15] is setting up NCCL communicator and retrieving "
            "ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: "
            "Connection reset by peer"
        ),
        "https://github.com/pytorch/pytorch/issues/75512": (
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer "
            "[10.0.0.2]:28048"
        ),
    },
    aborted={
        "https://github.com/huggingface/picotron_tutorial/issues/6": (
            "terminate called after throwing an instance of 'std::runtime_error'\n  what():  [Rank 2] NCCL "
            "watchdog thread terminated with exception: [Rank 2] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=120000) ran "
            "for 120822 milliseconds before timing out.\n"
        ),
    },
)

# No GPU and no peer is at fault: a container's small /dev/shm, and a script's choice of devices.
_NCCL_SETUP = _classify(
    "",
    "machine",
    "restart",
    raised={
        "https://github.com/vllm-project/vllm/issues/14537": (
            f"{_NCCL_SYSTEM}Error while creating shared memory segment /dev/shm/nccl-AbCdEf (size 7340384)"
        ),
    },
) + _classify(
    "",
    "script",
    "restart",
    raised={
        "https://github.com/verl-project/verl/issues/161": (
            f"{_NCCL}invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.20.5\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate "
            "GPU detected : rank 1 and rank 0 both on CUDA device 10000"
        ),
    },
)

ERROR_TEXTS: tuple[ErrorText, ...] = _HARDWARE + _MISSING + _ACCESS + _MEMORY + _OTHER + _PEER + _NCCL_SETUP
