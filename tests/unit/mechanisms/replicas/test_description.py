"""Test what people read of replicas that differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.mechanisms.replicas.description import DivergenceVerdict, describe_divergence
from elastic_resume.report import summary
from tests.support.report_runs import Job


def test_replicas_that_differ_are_the_first_hint() -> None:
    """The numbers are wrong, whatever else happened."""
    job = Job().begun()
    job.add(110, "commit-failed", "n0", generation=1, step=11, error="no space left")
    fields = {"agreed_step": 8, "nodes": [["n0"], ["n1"]], "diverged_nodes": []}
    job.add(111, "replicas-differ", "n1", generation=1, step=12, **fields)
    hints = summary.build_run_report(job.events).verdict.hints
    assert "n1: replicas differ, and there is no majority; the job ends" in hints[0]
    assert len(hints) > 1


ALONE = """
replicas differ at step 128: node c is not as nodes a and b, the majority. Look at what that machine computes
(memory, device), or at what the script does only there (all were equal at step 96). Start again without it.
Machines of different kinds round differently: with ELASTIC_RESUME_CHECK_REPLICAS=off they continue, and one
node's values count at each resume. `elastic-resume diff` of two nodes' checkpoints names the tensors.
"""
NOBODY = """
replicas differ at step 128: node a against node b. No majority: it is unknown which node is wrong (no step of
this generation was seen equal). Look for what nodes do not share: random numbers, samples, a broken device.
To continue from an older checkpoint, move the newer ones elsewhere. Machines of different kinds round
differently: with ELASTIC_RESUME_CHECK_REPLICAS=off they continue, and one node's values count at each
resume. `elastic-resume diff` of two nodes' checkpoints names the tensors.
"""


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (DivergenceVerdict(128, 96, (("a", "b"), ("c",)), ("c",)), ALONE),
        (DivergenceVerdict(128, 0, (("a",), ("b",))), NOBODY),
    ],
)
def test_people_are_told_who_differs_and_what_to_do(verdict: DivergenceVerdict, expected: str) -> None:
    """The whole sentence."""
    assert describe_divergence(verdict) == " ".join(expected.split())


@given(
    st.lists(st.lists(st.text(max_size=9), max_size=9).map(tuple), max_size=9).map(tuple),
    st.lists(st.text(max_size=9), max_size=9).map(tuple),
)
def test_whatever_a_peer_calls_a_verdict_can_be_said(
    camps: tuple[tuple[str, ...], ...], wrong: tuple[str, ...]
) -> None:
    """In one line of bounded length."""
    text = describe_divergence(DivergenceVerdict(1, 0, camps, wrong))
    assert text.isprintable()
    assert len(text) < 5000
