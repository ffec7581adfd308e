"""What the mesh of a node's ranks needs of its launcher."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import distributed_c10d

import elastic_resume as er
from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.ranks.node_mesh import PLACEHOLDER, NodeMesh


@pytest.mark.parametrize(("count", "told"), [(None, "not set"), ("1", "1"), ("two", "two")])
def test_rank_beyond_its_nodes_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: str | None, told: str
) -> None:
    """Its node's group would not have it."""
    monkeypatch.setattr(NodeMesh, "current", None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv(constants.ENV_LOCAL_RANK, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if count is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", count)
    with pytest.raises(ConfigError, match=rf"LOCAL_RANK is 1, and LOCAL_WORLD_SIZE is {told}\. Set"):
        er.shard_mesh()
    assert NodeMesh.current is None


def test_virtual_local_rank_is_not_the_rank_in_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's --virtual-local-rank sets LOCAL_RANK to 0 on every rank."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv(constants.ENV_LOCAL_RANK, "1")
    c10d: Any = distributed_c10d
    try:
        assert NodeMesh().group.rank() == 1
    finally:
        c10d._unregister_process_group(PLACEHOLDER)
