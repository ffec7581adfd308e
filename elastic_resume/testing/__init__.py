"""Test a training script on simulated nodes, and compare a killed run with an undisturbed one.

The package is a pytest plugin. Its fixture ``elastic_cluster`` has three nodes that can be killed, cut off
and started again; each step has a snapshot::

    def test_my_training_survives(elastic_cluster):
        elastic_cluster.start("train.py", "--epochs", "2")
        elastic_cluster.at(step=20, rank=1).kill()
        elastic_cluster.at(step=35, node=2).kill()
        assert elastic_cluster.wait_exit() == [0, 0]
        assert elastic_cluster.lost_steps == 0

The mark ``@pytest.mark.elastic_resume(nodes=4, hosts="namespaces")`` takes the arguments of `Cluster`. The
fixture ``make_cluster`` makes several clusters. `assert_same_run` fails unless a run under faults ends bit
for bit like an undisturbed run. docs/guides/testing.md has more.

Tests may run side by side (pytest-xdist), and nothing is left of a test's nodes however it ends. A test run
without these fixtures imports only this module and `pytest_plugin`, the only module that needs pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_resume.testing.cluster import (
        Cluster,
        ClusterTimeoutError,
        Node,
        Recovery,
        Trigger,
        TriggerError,
    )
    from elastic_resume.testing.equivalence import assert_same_run
    from elastic_resume.testing.faults import Fault
    from elastic_resume.testing.pytest_plugin import elastic_cluster, make_cluster

_CLUSTER_MODULE, _EQUIVALENCE_MODULE = "elastic_resume.testing.cluster", "elastic_resume.testing.equivalence"
_PLUGIN_MODULE = "elastic_resume.testing.pytest_plugin"
pytest_plugins = (_PLUGIN_MODULE,)  # pytest imports it with this module, its entry point
_LAZY_EXPORTS = {
    "Cluster": _CLUSTER_MODULE,
    "Fault": "elastic_resume.testing.faults",
    "ClusterTimeoutError": _CLUSTER_MODULE,
    "Trigger": _CLUSTER_MODULE,
    "TriggerError": _CLUSTER_MODULE,
    "Node": _CLUSTER_MODULE,
    "Recovery": _CLUSTER_MODULE,
    "assert_same_run": _EQUIVALENCE_MODULE,
    "elastic_cluster": _PLUGIN_MODULE,
    "make_cluster": _PLUGIN_MODULE,
}

__all__ = [
    "Cluster",
    "ClusterTimeoutError",
    "Fault",
    "Node",
    "Recovery",
    "Trigger",
    "TriggerError",
    "assert_same_run",
    "elastic_cluster",
    "make_cluster",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_EXPORTS[name]), name)
