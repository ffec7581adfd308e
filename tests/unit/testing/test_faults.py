"""Faults and plans: parsing, refusals, and schedules that follow from the seed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from elastic_resume.errors import ConfigError
from elastic_resume.testing import faults
from elastic_resume.testing.faults import (
    KINDS,
    PHASES,
    PLAN_KEYS,
    ROLES,
    SETTING_NAMES,
    Fault,
    FaultPlan,
    JobShape,
    RandomFaults,
    default_weights,
    failpoint_for_phase,
    plan_key,
)
from tests.support.paths import ROOT

NAMESPACES = JobShape(3, 2, "namespaces")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("kill-worker", rank=1, step=20), "kill-worker rank 1 at step 20"),
        (Fault("cut", node=2, at_s=90, for_s=0.25), "cut node 2 at 90s for 0.25s"),
        (Fault("kill-agent", role="leader", phase="in commit"), "kill-agent leader in commit"),
        (Fault("exit", phase="in copy", step=7), "exit random in copy from step 7"),
        (Fault("partition", groups=((0,), (1, 2)), step=4), "partition n0 | n1 n2 at step 4"),
    ],
)
def test_fault_is_described_in_one_line(fault: Fault, text: str) -> None:
    """Defaults are left out."""
    assert str(fault) == text


def test_parse_plan_reads_all_settings() -> None:
    """Values have units; a missing setting has its kind's default."""
    plan = faults.parse_plan("""
seed: 3
faults:
  - {what: slow-link, node: 1, at: 1m, for: 2.5s, rate: 64kB/s}
  - {what: out-of-memory, rank: 0, step: 9, limit: 300MB}
  - {what: kill-agent, role: leader, at: 2s, back-after: 90m}
  - {what: kill-node, node: 2, step: 4, back_after: 250ms}
  - what: partition
    groups: [[0], [1, 2]]
    step: 12
every: {mtbf: 15s, kinds: [cut, kill-node], count: 40}
""")
    slow, memory, agent, node, parts = plan.faults
    assert (slow.bytes_per_s, slow.for_s, slow.at_s) == (64_000, 2.5, 60)
    assert (memory.limit_bytes, agent.back_after_s, agent.role) == (300_000_000, 5400, "leader")
    assert node.back_after_s == 0.25
    assert (parts.groups, parts.for_s) == (((0,), (1, 2)), KINDS["partition"].settings["for_s"])
    assert plan.every == RandomFaults(15, ("cut", "kill-node"), count=40)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("faults: [{what: kil-node, step: 3}]", ["plan: fault 1: ", "kil-node", "Did you mean kill-node"]),
        ("\nfauls: []", ["plan: there is no 'fauls'", "Did you mean faults"]),
        ("faults: [{what: exit, step: 3}, {what: cut, fore: 3s}]", ["fault 2: ", "Did you mean for"]),
        ("faults: [{node: 1, step: 3}]", ["say what"]),
        ("faults: [{what: cut, node: 1}]", ["say when"]),
        ("faults: [{what: cut, node: 1, at: soon}]", ["at is 'soon'", "30s"]),
        ("faults: [{what: cut, node: 1, at: 20s, step: 3}]", ["not both"]),
        ("faults: [{what: cut, node: -1, at: 20s}]", ["node is -1", "whole number"]),
        ("faults: [{what: cut, node: [1], at: 20s}]", ["must be one value"]),
        ("faults: [{what: cut, rank: 1, at: 20s}]", ["hits a node"]),
        ("faults: [{what: cut, role: boss, at: 20s}]", ["no role 'boss'", "leader"]),
        ("faults: [{what: kill-worker, rank: 1, node: 1, at: 20s}]", ["one of node, rank and role"]),
        ("faults: [{what: exit, percent: 3, step: 2}]", ["exit has no percent", "It has: code"]),
        ("faults: [{what: exit, code: 0, step: 2}]", ["code is 0", "1 to 255"]),
        ("faults: [{what: kill-worker, signal: SIGFOO, step: 2}]", ["signal is 'SIGFOO'", "as SIGSEGV"]),
        ("faults: [{what: raise, error: FooError, step: 2}]", ["error is 'FooError'", "as ValueError"]),
        ("faults: [{what: raise, error: KeyboardInterrupt, step: 2}]", ["error is", "as ValueError"]),
        ("faults: [{what: raise, error: UnicodeDecodeError, step: 2}]", ["error is", "as ValueError"]),
        ("faults: [{what: kill-worker, role: leader, step: 2}]", ["the leader is an agent", "give a rank"]),
        ("faults: [{what: cut, for: 0s, step: 2}]", ["for is 0", "above 0"]),
        ("faults: [{what: packet-loss, percent: 101, step: 2}]", ["percent is 101"]),
        ("faults: [{what: packet-loss, percent: few, step: 2}]", ["percent is 'few'"]),
        ("faults: [{what: slow-rank, phase: in copy}]", ["slow-rank has no phase"]),
        ("faults: [{what: exit, phase: in comit}]", ["no phase 'in comit'", "Did you mean in commit"]),
        ("faults: [{what: exit, phase: in commit}]", ["in a worker", "in the agent"]),
        ("faults: [{what: partition, groups: [[0, 1]], step: 2}]", ["two groups"]),
        ("faults: [{what: partition, groups: [[0], [0, 1]], step: 2}]", ["each node once"]),
        ("faults: [{what: partition, groups: 3, step: 2}]", ["lists of nodes"]),
        ("faults: [{what: partition, groups: [a], step: 2}]", ["each node once"]),
        ("faults: [kill everybody]", ["NAME: VALUE", "{what: kill-worker, rank: 1, step: 20}"]),
        ("faults: {what: exit, step: 3}", ["a list"]),
        ("every: {kinds: [cut]}", ["mtbf", "missing"]),
        ("every: {mtbf: 0s}", ["mtbf", "above 0"]),
        ("every: {mtbf: 1s, kinds: {cut: 1}}", ["every: kinds is a list"]),
        ("every: {mtbf: 1s, count: many}", ["count is 'many'"]),
        ("seed: -1", ["seed is -1"]),
        ("seed: [", ["not YAML"]),
        ("- a\n", ["NAME: VALUE"]),
    ],
)
def test_parse_plan_of_wrong_text_names_entry_and_remedy(text: str, parts: list[str]) -> None:
    """The error names file and entry, the reason, and the alternatives."""
    with pytest.raises(ConfigError) as caught:
        faults.parse_plan(text)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert str(caught.value).startswith("plan:")


def test_read_plan_of_unreadable_file_names_it(tmp_path: Path) -> None:
    """The file is missing, or no text."""
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        faults.read_plan(tmp_path / "none.yaml")
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not text"):
        faults.read_plan(tmp_path / "x")


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        (FaultPlan((Fault("kill-node", node=3, step=1),)), ["fault 1", "no node 3", "0 to 2"]),
        (
            FaultPlan((Fault("exit", rank=0, step=1), Fault("exit", rank=6, step=1))),
            ["fault 2", "no rank 6", "0 to 5"],
        ),
        (
            FaultPlan((Fault("partition", groups=((0,), (1,)), step=1),)),
            ["fault 1", "each node once", "0 to 2"],
        ),
        (
            FaultPlan((Fault("cut", node=1, at_s=3),)),
            ["fault 1", "a network and a disk of their own", "--hosts namespaces"],
        ),
        (
            FaultPlan(every=RandomFaults(5, ("disk-full",), count=1)),
            ["every: disk-full", "a disk of their own"],
        ),
    ],
)
def test_validate_refuses_impossible_faults(plan: FaultPlan, parts: list[str]) -> None:
    """The job has three loopback nodes with two workers each."""
    with pytest.raises(ConfigError) as caught:
        plan.validate(JobShape(3, 2))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_kinds_have_valid_settings_and_random_targets() -> None:
    """Each setting is a field of Fault, and each phase is a failpoint."""
    assert set(SETTING_NAMES) <= {field.name for field in fields(Fault)} == set(PLAN_KEYS.values())
    for what in KINDS:
        (drawn,) = FaultPlan((Fault(what, step=2),)).schedule(NAMESPACES)
        assert not drawn.has_random_target, what
    assert all(failpoint_for_phase(phase) for phase in PHASES)


def test_docs_name_every_kind_role_phase_and_setting() -> None:
    """By the words that a plan uses."""
    page = (ROOT / "docs" / "guides" / "chaos.md").read_text()
    for name in (*KINDS, *ROLES, *PHASES, *map(plan_key, SETTING_NAMES)):
        assert name in page, name


def test_default_weights_exclude_impossible_and_fatal_kinds() -> None:
    """Without root no link is cut; nothing hangs for ever, and replicas stay equal."""
    assert not any(KINDS[what].needs_namespaces for what in default_weights(JobShape(3)))
    assert "partition" in default_weights(NAMESPACES)
    assert not {"partition"} & set(default_weights(JobShape(2, 1, "namespaces")))
    never = {"skip-collective", "hold-gil", "stop-worker", "out-of-memory"}
    assert not never & set(default_weights(NAMESPACES))


def test_random_faults_follow_kinds_mean_gap_and_bounds() -> None:
    """A written fault after the end is kept."""
    every = RandomFaults(10, ("kill-node", "raise"))
    drawn = FaultPlan(every=every, seed=1).schedule(JobShape(4), until_s=20_000)
    assert 1800 < len(drawn) < 2200
    assert 0.45 < sum(fault.what == "kill-node" for fault in drawn) / len(drawn) < 0.55
    times = [fault.at_s or 0 for fault in drawn]
    assert times == sorted(times)
    assert times[0] >= 1  # the least gap
    assert times[-1] <= 20_000
    assert {fault.node for fault in drawn if fault.what == "kill-node"} == {0, 1, 2, 3}
    assert {fault.rank for fault in drawn if fault.what == "raise"} == {0, 1, 2, 3}
    late = Fault("kill-node", node=0, at_s=30_000)
    assert late in FaultPlan((late,), every).schedule(JobShape(4), until_s=20_000)
    with pytest.raises(ConfigError, match="without an end"):
        FaultPlan(every=every).schedule(JobShape(4))


def test_seed_fixes_schedule() -> None:
    """The same seed gives the same schedule on each machine, without open targets."""
    plan = FaultPlan((Fault("exit", step=3), Fault("partition", at_s=2)), RandomFaults(3.5, count=5), seed=4)
    schedule = plan.schedule(NAMESPACES)
    assert schedule == plan.schedule(NAMESPACES)
    assert len(schedule) == 7
    assert not any(fault.has_random_target for fault in schedule)


def test_different_seeds_give_different_schedules() -> None:
    """Otherwise a soak would repeat one schedule."""
    every = RandomFaults(5, count=8)
    found = {FaultPlan(every=every, seed=seed).schedule(JobShape(4)) for seed in range(20)}
    assert len(found) == 20
