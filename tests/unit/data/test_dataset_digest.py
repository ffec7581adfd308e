"""Test which differences between two datasets are seen, without reading a sample."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import elastic_resume as er
from elastic_resume.data.dataset_digest import digest_dataset


class Files(torch.utils.data.Dataset[int]):
    """Finds its samples by a list."""

    def __init__(self, files: Any) -> None:
        self.files, self.transform = files, object()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> int:
        raise AssertionError("a sample was read")


def digest(dataset: Any) -> int:
    """Return the digest of a loader of ``dataset``."""
    return digest_dataset(SimpleNamespace(dataset=dataset))


FEW = Files(list("abcdef"))
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "random_split": (Subset(FEW, [0, 1, 2]), Subset(FEW, [0, 2, 1])),
    "a split of a split": (Subset(Subset(FEW, [0, 1, 2]), [0, 1]), Subset(Subset(FEW, [1, 0, 2]), [0, 1])),
    "numpy's permutation": (Subset(FEW, np.array([0, 1])), Subset(FEW, np.array([1, 0]))),  # type: ignore[arg-type]
    "within er.seeded": (er.seeded(Subset(FEW, [0, 1])), er.seeded(Subset(FEW, [1, 0]))),
    "one of several": (ConcatDataset([FEW, Subset(FEW, [0, 1])]), ConcatDataset([FEW, Subset(FEW, [1, 0])])),
    "shuffled files": (FEW, Files(list("abcdfe"))),
    "shuffled pairs": (Files([("a", 0), ("b", 1)]), Files([("b", 1), ("a", 0)])),
    "tensors": (TensorDataset(torch.tensor([0.5, 1.0])), TensorDataset(torch.tensor([0.25, 1.0]))),
    "another length": (Files([0] * 1000), Files([0] * 1001)),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_dataset_that_was_drawn_anew_has_another_digest(kind: str) -> None:
    """The same one has the same."""
    one, other = DIFFERENT[kind]
    assert digest(one) == digest(one) != digest(other)
    assert digest(one)


def test_what_may_differ_between_nodes_has_the_same_digest() -> None:
    """Directories of files; and a dataset without a list tells nothing."""
    paths = [Files([Path(top) / "a.jpg", f"{top}/b.jpg"]) for top in ("/node0", "/node1/disk")]
    assert digest(paths[0]) == digest(paths[1])
    assert digest(Files([object(), object()])) == digest(Files([object(), object()]))
    assert digest(range(3)) == digest_dataset(None) == 0


class Odd(torch.utils.data.Dataset[int]):
    """Has attributes that no digest can read, or that may differ between ranks."""

    def __init__(self, rank: int) -> None:
        self.devices, self.directories = [f"cuda:{rank}"], (f"/scratch/{rank}",)
        self.sizes = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        self.quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
        self.meta = torch.ones(3, device="meta")
        self.datasets = [self] * 6

    def __len__(self) -> int:
        return 3


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_is_no_list_of_samples_tells_nothing() -> None:
    """A right script is neither ended nor warned, and a cycle ends."""
    assert digest(Odd(0)) == digest(Odd(1))
