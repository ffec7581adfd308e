"""GPUs that do not exist, for tests of what NVML reports, in this process and in those of simulated nodes.

::

    gpus = FakeGpus(tmp_path, count=2)
    with Cluster(tmp_path, nodes=3, env=gpus.env) as cluster:
        ...
        gpus.wait_watched("n1")
        gpus.report_xid(0, 79, node="n1", recovery_action=2)
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import gpus
from tests.support.paths import ROOT, TESTS
from tests.support.processes import wait_for

DIRECTORY = TESTS / "support" / "fake_nvml"
EVERY_NODE = "*"


class FakeGpus:
    """The GPUs of all nodes, or of this process; every change takes effect at the next call of NVML.

    A node is a dict with ``gpus``, ``xids`` [[index, Xid]], and with ``hanging`` and ``missing``, names of
    functions. ``errors`` {function: code}, of a node or of a GPU, makes calls fail.
    """

    def __init__(self, directory: Path, count: int = 1, name: str = "NVIDIA H100 80GB HBM3") -> None:
        """Give every node ``count`` healthy GPUs, with UUIDs GPU-0000, GPU-0001 and so on."""
        self.path = directory / "nvml.json"
        healthy = [
            {
                "uuid": f"GPU-{index:04}",
                "name": name,
                "instances": [],  # UUIDs of MIG
                "recovery_action": 0,  # a number of NVML's enum; None: the driver has no such field
                "lost": False,
                "clocks": [1980, 1980, 2619],  # graphics, SM and memory, in MHz
                "max_clocks": [1980, 1980, 2619],
                "temperatures": [45],
                "clock_reasons": 0,
                "errors": {},
            }
            for index in range(count)
        ]
        self._nodes: dict[str, dict[str, Any]] = {
            EVERY_NODE: {"gpus": healthy, "xids": [], "hanging": [], "missing": [], "errors": {}}
        }
        self._write()

    @property
    def env(self) -> dict[str, str]:
        """Variables with which a process finds this pynvml, and the package."""
        return {"PYTHONPATH": f"{ROOT}{os.pathsep}{DIRECTORY}", "FAKE_NVML": str(self.path)}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make them the GPUs of this process, whatever it has."""
        monkeypatch.setenv("FAKE_NVML", str(self.path))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        monkeypatch.syspath_prepend(DIRECTORY)
        module = importlib.import_module("pynvml")
        del sys.modules["pynvml"]
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.setattr(gpus, "_identities", {})

    def change(self, node: str = EVERY_NODE, **fields: Any) -> None:
        """Set ``hanging``, ``missing``, ``errors``, ``gpus`` or ``xids`` of a node."""
        self._node(node).update(fields)
        self._write()

    def change_gpu(self, index: int, node: str = EVERY_NODE, **fields: Any) -> None:
        """Set fields of one GPU."""
        self._node(node)["gpus"][index].update(fields)
        self._write()

    def report_xid(self, index: int, xid: int, node: str = EVERY_NODE, **fields: Any) -> None:
        """Let the driver report an Xid, and set fields of the GPU, to those who watch it already."""
        state = self._node(node)
        state["gpus"][index].update(fields)
        state["xids"].append([index, xid])
        self._write()

    def wait_watched(self, node: str = "", index: int = 0) -> None:
        """Wait until a process of the node has registered for the Xids of a GPU."""
        record = self.path.with_name(self.path.name + ".watched")
        line = f"{node} {index}"
        wait_for(
            lambda: record.exists() and line in record.read_text().splitlines(),
            f"a registration for Xids of GPU {index}",
        )

    def _node(self, node: str) -> dict[str, Any]:
        """Return the state of a node, which from now on is its own."""
        if node not in self._nodes:
            self._nodes[node] = json.loads(json.dumps(self._nodes[EVERY_NODE]))
        return self._nodes[node]

    def _write(self) -> None:
        scratch = self.path.with_suffix(".new")
        scratch.write_text(json.dumps(self._nodes))
        scratch.replace(self.path)  # readers see all of it or nothing
