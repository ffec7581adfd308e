"""Faults: refusals, and random faults that follow from the seed."""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
from typing import Any

import pytest

from elastic_resume.errors import ConfigError
from elastic_resume.testing.faults import (
    KINDS,
    ROLES,
    SETTING_NAMES,
    Fault,
    JobShape,
    check_faults,
    default_weights,
    draw_random_faults,
)
from tests.support.paths import ROOT

NAMESPACES = JobShape(3, 2, "namespaces")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("kill-worker", rank=1, step=20), "kill-worker rank 1 at step 20"),
        (Fault("cut", node=2, at_s=90, for_s=0.25), "cut node 2 at 90s for 0.25s"),
        (Fault("kill-agent", role="leader", at_s=2), "kill-agent leader at 2s"),
        (Fault("partition", groups=((0,), (1, 2)), step=4), "partition n0 | n1 n2 at step 4"),
    ],
)
def test_fault_is_described_in_one_line(fault: Fault, text: str) -> None:
    """Defaults are left out."""
    assert str(fault) == text


@pytest.mark.parametrize(
    ("what", "more", "parts"),
    [
        ("kil-node", {"node": 0, "step": 3}, ["no fault 'kil-node'", "Did you mean kill-node"]),
        ("cut", {"node": 1}, ["say when"]),
        ("cut", {"node": 1, "at_s": 20, "step": 3}, ["one of step=20 and at_s=40"]),
        ("cut", {"rank": 1, "at_s": 20}, ["give one of node, role, for its target"]),
        ("cut", {"role": "boss", "at_s": 20}, ["no role 'boss'", "leader"]),
        ("cut", {"at_s": 20}, ["give one of node, role, for its target"]),
        ("cut", {"groups": [[0], [1]], "at_s": 20}, ["give one of node, role, for its target"]),
        ("partition", {"node": 1, "at_s": 20}, ["give one of groups"]),
        ("kill-worker", {"rank": 1, "node": 1, "at_s": 20}, ["one of node, rank, role"]),
        ("kill-worker", {"role": "leader", "step": 2}, ["the leader is an agent", "give a rank"]),
        ("exit", {"rank": 0, "percent": 3, "step": 2}, ["exit has no percent", "It has: code"]),
    ],
)
def test_impossible_fault_is_refused_with_remedy(what: str, more: dict[str, Any], parts: list[str]) -> None:
    """The error names the fault, the reason, and the alternatives."""
    with pytest.raises(ConfigError) as caught:
        Fault(what, **more)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        (Fault("kill-node", node=3, step=1), ["fault 2", "no node 3", "0 to 2"]),
        (Fault("exit", rank=6, step=1), ["fault 2", "no rank 6", "0 to 5"]),
        (Fault("partition", groups=((0,), (1,)), step=1), ["fault 2", "each node once", "0 to 2"]),
        (Fault("cut", node=1, at_s=3), ["fault 2", "a disk of their own", 'hosts="namespaces"']),
    ],
)
def test_check_faults_refuses_what_nodes_cannot_have(fault: Fault, parts: list[str]) -> None:
    """The job has three loopback nodes with two workers each."""
    with pytest.raises(ConfigError) as caught:
        check_faults([Fault("exit", rank=0, step=1), fault], JobShape(3, 2))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_docs_name_every_kind_role_and_setting() -> None:
    """As `Fault` takes them."""
    assert set(SETTING_NAMES) <= {field.name for field in fields(Fault)}
    page = (ROOT / "docs" / "guides" / "testing.md").read_text()
    for name in (*KINDS, *ROLES, *SETTING_NAMES):
        assert name in page, name


def test_default_weights_exclude_impossible_and_fatal_kinds() -> None:
    """Without root no link is cut; nothing hangs for ever, and replicas stay equal."""
    assert not any(KINDS[what].needs_namespaces for what in default_weights(JobShape(3)))
    assert "partition" in default_weights(NAMESPACES)
    assert not {"partition"} & set(default_weights(JobShape(2, 1, "namespaces")))
    never = {"skip-collective", "hold-gil", "stop-worker", "out-of-memory"}
    assert not never & set(default_weights(NAMESPACES))


def test_random_faults_follow_weights_mean_gap_and_bounds() -> None:
    """Targets are spread over all nodes and ranks."""
    drawn = list(draw_random_faults(JobShape(4), mtbf_s=10, until_s=20_000, seed=1))
    assert 1800 < len(drawn) < 2200
    weights = default_weights(JobShape(4))
    share = sum(fault.what == "kill-node" for fault in drawn) / len(drawn)
    assert share == pytest.approx(weights["kill-node"] / sum(weights.values()), rel=0.2)
    times = [fault.at_s or 0 for fault in drawn]
    assert times == sorted(times)
    assert times[0] >= 1  # the least gap
    assert times[-1] <= 20_000
    assert {fault.node for fault in drawn if fault.what == "kill-node"} == {0, 1, 2, 3}
    assert {fault.rank for fault in drawn if fault.what == "raise"} == {0, 1, 2, 3}


def test_seed_fixes_random_faults() -> None:
    """The same seed gives the same faults on each machine; others give others, or a soak would repeat."""

    def draw(seed: int) -> tuple[Fault, ...]:
        return tuple(islice(draw_random_faults(NAMESPACES, mtbf_s=5, until_s=1e4, seed=seed), 8))

    assert draw(4) == draw(4)
    assert len({draw(seed) for seed in range(20)}) == 20
