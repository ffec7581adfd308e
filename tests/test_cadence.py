"""How often to save: the setting's forms, and when a save is due."""

from __future__ import annotations

import math

import pytest

from elastic_resume.errors import ConfigError
from elastic_resume.policy.cadence import (
    ASSUMED_MTBF_S,
    LONGEST_INTERVAL_S,
    SaveEvery,
    auto_interval_s,
    is_due,
)


@pytest.mark.parametrize("text", ["auto", "1", "100", "30s", "1.5s"])
def test_every_form_is_read_and_given_back(text: str) -> None:
    """What `str` gives is what `parse` reads."""
    assert str(SaveEvery.parse(text)) == text


@pytest.mark.parametrize("text", ["", "0", "-3", "0s", "5m", "s", "1e3", "nan", "infs", "100 steps"])
def test_other_forms_are_refused_with_the_right_ones(text: str) -> None:
    """The error tells what may be written."""
    with pytest.raises(ConfigError, match="number of steps"):
        SaveEvery.parse(text)


def test_a_number_of_steps_means_its_multiples_so_that_nodes_save_the_same_steps() -> None:
    """After a resume in between, the next multiple is due, not the next N steps."""
    every = SaveEvery(steps=10)
    due = [s for s in range(14, 41) if is_due(every, step=s, saved_step=13, since_s=0, stall_s=0.0)]
    assert due[0] == 20
    assert not is_due(every, step=9, saved_step=0, since_s=99, stall_s=None)
    assert is_due(every, step=23, saved_step=13, since_s=0, stall_s=0.0), "20 passed while the disk was busy"


def test_auto_saves_after_the_first_step_and_then_by_cost() -> None:
    """What cannot be stored is told at once; a save that costs nothing may come often, never every step."""
    auto = SaveEvery()
    assert is_due(auto, step=1, saved_step=0, since_s=0.0, stall_s=None)
    assert not is_due(auto, step=2, saved_step=1, since_s=0.1, stall_s=0.001)
    assert is_due(auto, step=2, saved_step=1, since_s=auto_interval_s(0.001), stall_s=0.001)
    assert not is_due(auto, step=1, saved_step=1, since_s=1e9, stall_s=0.001), "nothing new to save"


def test_auto_is_youngs_optimum_within_its_bounds() -> None:
    """sqrt(2 w M) - w, at most ten minutes."""
    assert auto_interval_s(0.05) == pytest.approx(math.sqrt(2 * 0.05 * ASSUMED_MTBF_S) - 0.05)
    assert auto_interval_s(1000.0) == LONGEST_INTERVAL_S
    assert auto_interval_s(0.0) == 0.0
