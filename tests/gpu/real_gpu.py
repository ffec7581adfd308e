"""The GPU of this machine, with the methods of a `FakeGpu`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

HUNDRED_MS = 200_000_000  # cycles of a GPU at 2 GHz


class RealGpu:
    """GPU 0."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        torch.cuda.init()

    def place(self, module: torch.nn.Module) -> None:
        """Move the parameters and buffers of ``module`` to the GPU."""
        module.to(self.device)

    def put(self, tensor: Tensor) -> Tensor:
        """Return a tensor with these values on the GPU."""
        return tensor.to(self.device)

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Delay the copies that are enqueued in this context."""
        torch.cuda._sleep(HUNDRED_MS)
        yield

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph."""
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"):
            torch.zeros(1, device=self.device)  # torch warns of an empty graph
            yield

    def get_seeds(self) -> list[int]:
        """Return the seed of each GPU's generator."""
        return [generator.initial_seed() for generator in torch.cuda.default_generators]
