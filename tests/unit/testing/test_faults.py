"""Plans of faults: what is read, what is refused and how, and that a seed says all."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.errors import ConfigError
from elastic_resume.testing import faults
from elastic_resume.testing.faults import (
    DISK,
    KINDS,
    NETWORK,
    NODES,
    PHASES,
    PLAN_KEYS,
    ROLES,
    SETTING_NAMES,
    WORKER,
    Fault,
    FaultPlan,
    RandomFaults,
    default_weights,
    failpoint_for_phase,
    plan_key,
)
from tests.support.paths import ROOT

ALL = [NETWORK, DISK]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("worker 1 at step 20", Fault("kill-worker", rank=1, step=20)),
        ("agent 0 at step 3", Fault("kill-agent", node=0, step=3)),
        ("node 2 at step 35", Fault("kill-node", node=2, step=35)),
        ("kill-worker node 2 at step 35", Fault("kill-worker", node=2, step=35)),
        ("cut 2 at 40s for 6s", Fault("cut", node=2, at_s=40)),
        ("cut node 2 at 1.5m for 250ms", Fault("cut", node=2, at_s=90, for_s=0.25)),
        ("kill-agent leader in commit", Fault("kill-agent", role="leader", phase="in commit")),
        ("exit lead in copy from step 7", Fault("exit", role="lead", phase="in copy", step=7)),
        (
            "kill-agent random in commit.before-rename from 3s",
            Fault("kill-agent", phase="commit.before-rename", at_s=3),
        ),
    ],
)
def test_a_line_of_text_is_a_fault(text: str, fault: Fault) -> None:
    """With what is left out filled in; and what a fault is called reads as the same fault."""
    assert Fault.parse(text) == fault
    assert Fault.parse(str(fault)) == fault


def test_an_entry_may_set_all_that_its_kind_has() -> None:
    """Units are written with the number; what is not said is the kind's default."""
    plan = faults.parse_plan("""
seed: 3
faults:
  - {what: slow-link, node: 1, at: 1m, for: 2.5s, rate: 64kB/s}
  - {what: out-of-memory, rank: 0, step: 9, limit: 300MB}
  - {what: kill-agent, role: leader, at: 2s, back-after: 90m}
  - {what: kill-node, node: 2, step: 4, back_after: 250ms, repeat: true}
  - what: partition
    groups: [[0], [1, 2]]
    step: 12
every: {mtbf: 15s, kinds: [cut, kill-node], until: 10m, count: 40}
""")
    slow, memory, agent, node, parts = plan.faults
    assert (slow.bytes_per_s, slow.for_s, slow.at_s) == (64_000, 2.5, 60)
    assert (memory.limit_bytes, agent.back_after_s, agent.role) == (300_000_000, 5400, "leader")
    assert (node.back_after_s, node.repeat) == (0.25, True)
    assert (parts.groups, parts.for_s) == (((0,), (1, 2)), KINDS["partition"].settings["for_s"])
    assert plan.every == RandomFaults(15, (("cut", 1), ("kill-node", 1)), until_s=600, count=40)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("faults: [{what: kil-node, step: 3}]", ["plan:1", "fault 1", "kil-node", "Did you mean kill-node"]),
        ("\nfauls: []", ["plan:2", "fauls", "Did you mean faults"]),
        (
            "faults:\n- cut 1 at 3s\n- {what: cut, node: 1, fore: 3s}",
            ["plan:3", "fault 2", "Did you mean for"],
        ),
        ("faults: [{what: cut, node: 1, node: 2, step: 3}]", ["given twice"]),
        ("faults: [{what: kill-node, back-after: 1s, back_after: 2s, step: 3}]", ["given twice"]),
        ("faults: [{node: 1, step: 3}]", ["say what"]),
        ("faults: [{what: cut, node: 1}]", ["say when"]),
        ("faults: [{what: cut, node: 1, at: soon}]", ["at is 'soon'", "30s"]),
        ("faults: [{what: cut, node: 1, at: 20s, step: 3}]", ["not both"]),
        ("faults: [{what: cut, node: -1, at: 20s}]", ["'-1'", "whole number"]),
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
        ("faults: [kill-worker leader at step 2]", ["the leader is an agent", "give a rank"]),
        ("faults: [{what: cut, for: 0s, step: 2}]", ["for is 0", "above 0"]),
        ("faults: [{what: packet-loss, percent: 101, step: 2}]", ["percent is 101"]),
        ("faults: [{what: corrupt-message, from: friend, step: 2}]", ["peer or unauthenticated"]),
        ("faults: [{what: exit, phase: in comit}]", ["no phase 'in comit'", "Did you mean in commit"]),
        ("faults: [{what: exit, phase: in commit}]", ["in a worker", "in the agent"]),
        ("faults: [{what: partition, groups: [[0, 1]], step: 2}]", ["two groups"]),
        ("faults: [{what: partition, groups: [[0], [0, 1]], step: 2}]", ["each node once"]),
        ("faults: [worker 1 at 20x]", ["at is '20x'"]),
        ("faults: [kill everybody]", ["cannot read", "WHAT WHOM WHEN"]),
        ("faults: worker 1 at step 3", ["a list"]),
        ("every: {kinds: [cut]}", ["mtbf", "missing"]),
        ("every: {mtbf: 0s}", ["mtbf", "above 0"]),
        ("every: {mtbf: 1s, kinds: {cut: 0}}", ["weight of cut"]),
        ("seed: -1", ["seed is '-1'"]),
        ("seed: [", ["not YAML"]),
        ("- a\n", ["NAME: VALUE"]),
        ("faults: [&a [*a]]", ["line 1: *a stands for", "write it out"]),
        ("faults:\n- &a {what: exit, step: 2}\n- *a", ["line 3: *a stands for"]),
    ],
)
def test_what_is_wrong_in_a_plan_is_named_with_what_to_write(text: str, words: list[str]) -> None:
    """File and line, which entry, why, and what there is instead."""
    with pytest.raises(ConfigError) as caught:
        faults.parse_plan(text)
    assert all(word in str(caught.value) for word in words), caught.value
    assert str(caught.value).startswith("plan:")


def test_a_plan_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, or no text."""
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        faults.read_plan(tmp_path / "none.yaml")
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not text"):
        faults.read_plan(tmp_path / "x")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (FaultPlan.from_faults("node 3 at step 1"), ["fault 1", "no node 3", "0 to 2"]),
        (
            FaultPlan.from_faults("worker 0 at step 1", "worker 6 at step 1"),
            ["fault 2", "no rank 6", "0 to 5"],
        ),
        (
            FaultPlan((Fault("partition", groups=((0,), (1,)), step=1),)),
            ["fault 1", "each node once", "0 to 2"],
        ),
        (FaultPlan.from_faults("cut 1 at 3s"), ["fault 1", "a network of their own", "--hosts namespaces"]),
        (
            FaultPlan(every=RandomFaults(5, (("disk-full", 1),), count=1)),
            ["every: disk-full", "a disk of their own"],
        ),
    ],
)
def test_what_cannot_come_here_is_refused_before_anything_starts(plan: FaultPlan, words: list[str]) -> None:
    """In a job of three loopback nodes with two workers each."""
    with pytest.raises(ConfigError) as caught:
        plan.validate(nodes=3, workers_per_node=2)
    assert all(word in str(caught.value) for word in words), caught.value


def test_all_kinds_are_named_alike() -> None:
    """Settings are fields, and each kind can be drawn; so can each phase be a failpoint."""
    assert set(SETTING_NAMES) <= {field.name for field in fields(Fault)} == set(PLAN_KEYS.values())
    for what in KINDS:
        (drawn,) = FaultPlan((Fault(what, step=2),)).schedule(nodes=3, node_resources=ALL)
        assert not drawn.has_random_target, what
    assert all(failpoint_for_phase(phase) for phase in PHASES)


def test_the_docs_name_every_kind_role_and_phase() -> None:
    """And what each kind has to be set, by the word that a plan uses."""
    page = (ROOT / "docs" / "chaos.md").read_text()
    for name in (*KINDS, *ROLES, *PHASES, *map(plan_key, SETTING_NAMES)):
        assert name in page, name


def test_a_mix_that_nobody_wrote_holds_what_the_nodes_can_do_and_a_job_survives() -> None:
    """Without root no link is cut; nothing hangs for ever and no replica is made to differ."""
    assert {KINDS[what].required_resource for what in default_weights([], 3)} == {""}
    assert "partition" in default_weights(ALL, 3)
    assert not {"partition"} & set(default_weights(ALL, 2))
    assert not {"skip-collective", "hold-gil", "stop-worker", "out-of-memory"} & set(default_weights(ALL, 4))


def test_faults_are_drawn_as_often_as_was_said_and_within_their_bounds() -> None:
    """Weights are heeded, gaps have their mean, and neither end is overstepped."""
    every = RandomFaults(10, (("kill-node", 3), ("raise", 1)), from_s=5)
    drawn = FaultPlan(every=every, seed=1).schedule(nodes=4, until_s=20_000)
    assert 1800 < len(drawn) < 2200
    assert 0.7 < sum(fault.what == "kill-node" for fault in drawn) / len(drawn) < 0.8
    times = [fault.at_s or 0 for fault in drawn]
    assert times == sorted(times)
    assert times[0] >= 6  # `from`, and the least gap
    assert times[-1] <= 20_000
    assert {fault.node for fault in drawn if fault.what == "kill-node"} == {0, 1, 2, 3}
    assert {fault.rank for fault in drawn if fault.what == "raise"} == {0, 1, 2, 3}
    late = Fault("kill-node", node=0, at_s=30_000)  # what is written is not dropped without a word
    assert late in FaultPlan((late,), every).schedule(nodes=4, until_s=20_000)
    with pytest.raises(ConfigError, match="without an end"):
        FaultPlan(every=every).schedule(nodes=4)


def any_fault() -> st.SearchStrategy[Fault]:
    """Any valid fault for three nodes with two workers each."""
    times = st.integers(1, 10**7).map(lambda ms: ms / 1000)
    whens: st.SearchStrategy[dict[str, Any]] = st.one_of(
        st.builds(lambda step: {"step": step}, st.integers(1, 10**6)),
        st.builds(lambda at_s: {"at_s": at_s}, times),
    )

    def of(what: str) -> st.SearchStrategy[Fault]:
        hits = KINDS[what].target
        wheres: dict[str, st.SearchStrategy[dict[str, Any]]] = {
            WORKER: st.sampled_from([{}, {"rank": 5}, {"node": 1}, {"role": "lead"}, {"role": "rank-0"}]),
            NODES: st.sampled_from([{}, {"groups": ((0,), (1, 2))}, {"groups": ((2, 0), (1,))}]),
        }
        where = wheres.get(hits, st.sampled_from([{}, {"node": 2}, {"role": "leader"}, {"role": "all"}]))
        ends = st.one_of(st.none(), times) if "for_s" in KINDS[what].settings else st.none()
        return st.builds(
            lambda where, when, for_s, repeat: Fault(what, **where, **when, for_s=for_s, repeat=repeat),
            where,
            whens,
            ends,
            st.booleans(),
        )

    return st.sampled_from(sorted(KINDS)).flatmap(of)


@given(st.lists(any_fault(), max_size=6), st.integers(0, 2**63 - 1), st.booleans())
def test_a_plan_reads_as_it_was_written_and_its_seed_says_all(
    listed: list[Fault], seed: int, with_drawn: bool
) -> None:
    """YAML and back is the same plan; the same seed is the same schedule, with nothing left open."""
    plan = FaultPlan(tuple(listed), RandomFaults(3.5, (("cut", 2.0),), count=5) if with_drawn else None, seed)
    assert faults.parse_plan(faults.format_plan(plan)) == plan
    plan.validate(nodes=3, workers_per_node=2, node_resources=ALL)
    schedule = plan.schedule(nodes=3, workers_per_node=2, node_resources=ALL)
    assert schedule == plan.schedule(nodes=3, workers_per_node=2, node_resources=ALL)
    assert len(schedule) == len(listed) + 5 * with_drawn
    assert not any(fault.has_random_target for fault in schedule)
    again = faults.parse_plan(faults.format_plan(FaultPlan(schedule, seed=seed)))
    assert again.schedule(nodes=3, workers_per_node=2) == schedule
    for fault in listed:  # what was said is not changed
        assert any(same.what == fault.what and same.time_text == fault.time_text for same in schedule)


def test_another_seed_is_another_schedule() -> None:
    """Else a soak would play one night for ever."""
    every = RandomFaults(5, count=8)
    found = {FaultPlan(every=every, seed=seed).schedule(nodes=4) for seed in range(20)}
    assert len(found) == 20
