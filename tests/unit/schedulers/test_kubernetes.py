"""How Kubernetes writes sizes, and how long it lets a pod end."""

from __future__ import annotations

import argparse

import pytest

from elastic_resume import constants
from elastic_resume.agent import options
from elastic_resume.errors import ConfigError
from elastic_resume.schedulers import kubernetes


def test_how_long_a_pod_may_take_to_end_is_read_or_not_known() -> None:
    """In seconds, as terminationGracePeriodSeconds."""
    assert kubernetes.read_termination_grace_s({constants.ENV_TERMINATION_GRACE_S: "120"}) == 120
    assert kubernetes.read_termination_grace_s({}) is None


@pytest.mark.parametrize(
    ("flag", "environ", "seconds"),
    [
        (None, {}, None),
        (None, {constants.ENV_TERMINATION_GRACE_S: "120"}, 60),
        ("7", {constants.ENV_TERMINATION_GRACE_S: "120"}, 7),
        (None, {constants.ENV_TERMINATION_GRACE_S: "120", constants.ENV_GRACE_S: "9"}, 9),
    ],
)
def test_workers_get_half_of_it_unless_somebody_says_otherwise(
    flag: str | None, environ: dict[str, str], seconds: float | None
) -> None:
    """The other half is for the commit. What a user set in the environment stays."""
    assert options.resolve_grace_s(argparse.Namespace(grace=flag), environ) == seconds


@pytest.mark.parametrize("text", ["2 min", "nan", "-1", "inf"])
def test_a_wrong_grace_is_named(text: str) -> None:
    """And what it holds is shown."""
    with pytest.raises(ConfigError, match=f"{constants.ENV_TERMINATION_GRACE_S} .*is '{text}'"):
        kubernetes.read_termination_grace_s({constants.ENV_TERMINATION_GRACE_S: text})


@pytest.mark.parametrize(
    ("text", "found"),
    [("4Gi", 4 << 30), ("512Mi", 512 << 20), ("1.5Gi", 3 << 29), ("2G", 2 * 10**9), ("7", 7), ("1e9", 10**9)],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, found: int) -> None:
    """Binary and decimal units, fractions, exponents."""
    assert kubernetes.parse_quantity_bytes(text, "--memory") == found


@pytest.mark.parametrize("text", ["lots", "4GB", "4gi", "-1Gi", "512m", "0", "Gi", "9Ei", "1e99", "٤Gi"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """512m is a quantity to Kubernetes: half a byte."""
    with pytest.raises(ConfigError, match="--memory"):
        kubernetes.parse_quantity_bytes(text, "--memory")
