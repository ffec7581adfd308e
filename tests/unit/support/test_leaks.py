"""Leak reports are removed from the output of a process, and nothing else."""

from __future__ import annotations

from tests.support.leak_reports import without_leaks

REPORT = """\
nanobind: leaked 1 instances!
 - leaked instance 0x151fb0042ba0 of type "triton._C.libtriton.ir.context"
nanobind: leaked 3 types!
 - leaked type "VecLib"
 - ... skipped remainder
nanobind: leaked 5 functions!
 - leaked function "__init__"
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def test_without_leaks_removes_only_leak_reports() -> None:
    """A script's own lines about leaks and empty lines stay."""
    output = "a word\n\nWARNING: a worker leaked 3 types\n - an item\n"
    assert without_leaks(REPORT) == ""
    assert without_leaks(output) == output
    assert without_leaks(f"a word\n{REPORT}another, without an end") == "a word\nanother, without an end"
