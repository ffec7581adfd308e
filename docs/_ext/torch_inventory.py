"""PyTorch's pages that docstrings and pages of this site refer to, as an inventory for intersphinx.

A build needs no network, so the few names stand here. To compare them with PyTorch's own inventory:

    curl -O https://docs.pytorch.org/docs/stable/objects.inv
    python docs/_ext/torch_inventory.py objects.inv
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

from sphinx.util.inventory import InventoryFile

BASE_URL = "https://docs.pytorch.org/docs/stable/"
# Name in Python: kind and place. Annotations name a class by the module that defines it.
OBJECTS = {
    "torch.Tensor": ("class", "tensors.html#torch.Tensor"),
    "torch.manual_seed": ("function", "generated/torch.manual_seed.html#torch.manual_seed"),
    "torch.nn.Module": ("class", "generated/torch.nn.Module.html#torch.nn.Module"),
    "torch.nn.modules.module.Module": ("class", "generated/torch.nn.Module.html#torch.nn.Module"),
    "torch.nn.parallel.DistributedDataParallel": (
        "class",
        "generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel",
    ),
    "torch.utils.data.DataLoader": ("class", "data.html#torch.utils.data.DataLoader"),
    "torch.utils.data.Dataset": ("class", "data.html#torch.utils.data.Dataset"),
    "torch.utils.data.dataset.Dataset": ("class", "data.html#torch.utils.data.Dataset"),
    "torch.utils.data.Sampler": ("class", "data.html#torch.utils.data.Sampler"),
    "torch.utils.data.sampler.Sampler": ("class", "data.html#torch.utils.data.Sampler"),
}


def write(path: Path) -> None:
    """Write the inventory in Sphinx's format, version 2."""
    head = "# Sphinx inventory version 2\n# Project: PyTorch\n# Version: stable\n# The rest is zlib.\n"
    lines = "".join(f"{name} py:{kind} 1 {uri} -\n" for name, (kind, uri) in OBJECTS.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.encode() + zlib.compress(lines.encode()))


def compare(path: Path) -> list[str]:
    """Return the places that PyTorch's own inventory does not have."""
    theirs = InventoryFile.loads(path.read_bytes(), uri="")
    places = {item.uri for objects in theirs.data.values() for item in objects.values()}
    return sorted({uri for _, uri in OBJECTS.values()} - places)


if __name__ == "__main__":
    sys.exit("\n".join(compare(Path(sys.argv[1]))))
