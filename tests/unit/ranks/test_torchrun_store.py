"""Ranks agree on a prefix that no earlier start has used, whatever that has left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from elastic_resume.ranks import torchrun_store

SIZE = 4


def agree(store: HashStore, ranks: range | list[int]) -> set[str]:
    """Return the prefixes on which these ranks agree, each in a thread."""
    with ThreadPoolExecutor(SIZE) as pool:
        calls = [pool.submit(torchrun_store._agree, store, rank, SIZE) for rank in ranks]
        return {call.result(timeout=60) for call in calls}


def test_each_start_has_a_prefix_of_its_own() -> None:
    """One prefix for all ranks."""
    store = HashStore()
    prefixes = [agree(store, range(SIZE)) for _ in range(5)]
    assert [len(one) for one in prefixes] == [1] * 5
    assert len(set.union(*prefixes)) == 5


def test_start_that_ended_halfway_is_not_joined() -> None:
    """A rank that said hello and was killed is greeted, never acknowledges, and says hello anew."""
    store = HashStore()
    first = agree(store, range(SIZE))
    for rank in range(1, SIZE):
        store.set(f"elastic_resume/hello/{rank}", "of a dead process")
    second = agree(store, range(SIZE))
    assert len(second) == 1
    assert not first & second


def test_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """After as long as torch waits."""
    monkeypatch.setattr(torchrun_store, "TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError, match="ranks 1, 2, 3 have not come to er"):
        torchrun_store._agree(HashStore(), 0, SIZE)


def test_other_launchers_have_no_such_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is opened."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert torchrun_store.open_store() is None
