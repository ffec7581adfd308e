"""Views a block of host memory as named tensors, without copying.

The block is byte for byte the safetensors file of a checkpoint. The same block is filled by a save,
written to disk, read and verified by a restore, and sent to ranks that lack it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from elastic_resume.checkpoint.layout import Layout, TensorSpec

# safetensors' name of each dtype. Complex tensors are stored as pairs of reals (see state.py).
NAME_BY_DTYPE: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPE_BY_NAME = {name: dtype for dtype, name in NAME_BY_DTYPE.items()}


def make_spec(name: str, tensor: Tensor) -> TensorSpec:
    """Describe ``tensor`` under ``name``."""
    return TensorSpec(name, NAME_BY_DTYPE[tensor.dtype], tuple(tensor.shape))


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy and without numpy.

    The tensor must outlive the view.
    """
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


class TensorBuffer:
    """A layout and the memory that it describes."""

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        """Take ``memory`` of ``layout.total_bytes`` bytes, header included."""
        self.layout = layout
        self.memory = memory

    def tensor(self, name: str) -> Tensor:
        """Return the tensor ``name`` as a view of the memory.

        Raises:
            KeyError: no such tensor.

        """
        extent = self.layout.extents[name]
        dtype = DTYPE_BY_NAME[extent.dtype]
        if extent.start == extent.stop:
            return torch.empty(extent.shape, dtype=dtype)
        count = (extent.stop - extent.start) // dtype.itemsize
        flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=extent.start)
        return flat.view(extent.shape)

    def tensor_bytes(self, name: str) -> memoryview:
        """Return the bytes of the tensor ``name``."""
        extent = self.layout.extents[name]
        return self.memory[extent.start : extent.stop]
