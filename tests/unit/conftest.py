"""What several packages of tests in one process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Make a process group of the test process alone, for the tests of a module."""
    import torch.distributed as dist  # noqa: PLC0415  tests of this directory without torch start sooner

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
