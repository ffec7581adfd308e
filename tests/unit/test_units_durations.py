"""One parser reads all durations: flags, variables, chaos and fault plans take the same forms."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_resume import config
from elastic_resume.agent import hang_detector, main, validation
from elastic_resume.agent.round_events import RoundEvents
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.config import Settings
from elastic_resume.errors import ConfigError
from elastic_resume.policy.checkpoint_interval import IntervalSetting
from elastic_resume.rendezvous.config import RendezvousConfig
from elastic_resume.report import status
from elastic_resume.schedulers import kubernetes
from elastic_resume.testing import chaos, faults
from elastic_resume.testing.faults import Fault
from elastic_resume.units import parse_duration

FORMS = {"300": 300.0, "5m": 300.0, "30s": 30.0, "1.5h": 5400.0, " 45 ": 45.0, "90000ms": 90.0}
FORMS |= {"4.5e1": 45.0, "30.": 30.0}
NONSENSE = ["", " ", "-5", "-5s", "nan", "inf", "infs", "1e400", "5 minutes", "3 s", "5x", "s", "1.5.2"]
NONSENSE += ["e5", ".", "5\u0661"]


def _terms(text: str) -> float:
    terms = RendezvousConfig.parse(
        "localhost:0", {"join_timeout": text}, {}, run_id="r", nnodes=(1, 1), local_addr="127.0.0.1"
    )
    return terms.join_timeout_s


def _hang(text: str) -> float:
    patience = hang_detector.parse_hang_timeout(text)
    assert patience is not None
    return patience.configured_s or 0.0


def _fault(text: str) -> float:
    return Fault.parse(f"cut node 1 at {text}").at_s or 0.0


def _plan_file(text: str) -> float:
    plan = faults.parse_plan(f"every: {{mtbf: '{text}', count: 1}}", "plan")
    assert plan.every is not None
    return plan.every.mtbf_s


def _grace_variable(text: str) -> float:
    grace_s = validation.resolve_grace_s(argparse.Namespace(grace=None), {"ELASTIC_RESUME_GRACE_S": text})
    assert grace_s is not None
    return grace_s


READERS: dict[str, Callable[[str], float | None]] = {
    "--grace": validation.parse_grace,
    "ELASTIC_RESUME_GRACE_S": _grace_variable,
    "ELASTIC_RESUME_STEP_MARK_S": config.parse_step_mark_s,
    "TERMINATION_GRACE_S": lambda text: kubernetes.read_termination_grace_s(
        {"ELASTIC_RESUME_TERMINATION_GRACE_S": text}
    ),
    "--hang-timeout": _hang,
    "--join-timeout": _terms,
    "--interval": status._parse_interval,
    "chaos --patience": chaos._duration_parser("--patience"),
    "fault": _fault,
    "fault plan": _plan_file,
}
# What these leave out is not for the parser: an empty variable is one that is not set.
UNSET = {"ELASTIC_RESUME_GRACE_S", "TERMINATION_GRACE_S"}


@pytest.mark.parametrize(
    ("where", "text"),
    [(one, text) for one in READERS for text in FORMS if one != "--interval" or FORMS[text] <= 3600],
)
def test_duration_forms_are_equal_in_all_settings(where: str, text: str) -> None:
    """A bare number of seconds and every unit, in each place that takes a duration."""
    assert READERS[where](text) == pytest.approx(FORMS[text])


@pytest.mark.parametrize(
    ("where", "text"),
    [(one, text) for one in READERS for text in NONSENSE if one not in UNSET or text.strip()],
)
def test_invalid_duration_is_refused_in_all_settings(where: str, text: str) -> None:
    """Empty, negative, not finite or with an unknown unit."""
    with pytest.raises((ConfigError, argparse.ArgumentTypeError)):
        READERS[where](text)


@pytest.mark.parametrize("value", [10 / 3, 0.1 + 0.2, 1e-05, 1e3, 5, 1e9])
def test_duration_from_number_is_exact(value: float) -> None:
    """The rendezvous configuration holds floats, and scripts print all digits."""
    assert parse_duration("--settle", value) == value
    assert parse_duration("--settle", f"{value!r}ms") == value * 0.001


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-05, 1e300])
def test_duration_from_invalid_number_is_refused(value: float) -> None:
    """The rules are those of text."""
    with pytest.raises(ConfigError):
        parse_duration("--settle", value)


@pytest.mark.parametrize("text", NONSENSE)
def test_duration_error_names_setting_value_and_forms(text: str) -> None:
    """The message needs no manual."""
    with pytest.raises(ConfigError) as error:
        parse_duration("--settle", text, min_s=1, max_s=60)
    assert str(error.value) == (
        f"--settle is {text.strip()!r}: write a time in seconds (30) or with a unit (500ms, 30s, 5m, 1.5h)."
    )


@pytest.mark.parametrize(
    ("text", "limits", "said"),
    [
        ("0", {"min_s": 1, "max_s": 60}, "from 1s to 60s"),
        ("2m", {"min_s": 1, "max_s": 60}, "from 1s to 60s"),
        ("500ms", {"min_s": 1}, "of 1s or more"),
        ("2m", {"max_s": 60}, "of 60s or less"),
        ("99999d", {}, "of 1000000000s or less"),
    ],
)
def test_duration_out_of_range_error_names_given_limits(
    text: str, limits: dict[str, float], said: str
) -> None:
    """A default limit would only confuse."""
    with pytest.raises(ConfigError) as error:
        parse_duration("--settle", text, **limits)
    assert str(error.value) == f"--settle is {text!r}: write a time {said}."


@pytest.mark.parametrize("flag", ["--mtbf", "--for", "--patience"])
def test_chaos_duration_error_names_flag(flag: str) -> None:
    """Several flags of chaos are durations."""
    with pytest.raises(ConfigError, match=rf"^{flag} is '5x': write a time in seconds"):
        chaos._build_parser().parse_args([flag, "5x", "--", "train.py"])


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300.0), ("30s", 30.0), ("1.5h", 5400.0), ("500ms", 0.5)]
)
def test_interval_setting_reads_steps_and_durations(text: str, seconds: float) -> None:
    """``--save-every 300`` are steps, ``300s`` and ``5m`` are time; workers read what agents write."""
    found = IntervalSetting.parse(text)
    assert found == IntervalSetting(seconds=seconds)
    assert IntervalSetting.parse(str(found)) == found
    assert IntervalSetting.parse("300") == IntervalSetting(steps=300)


@pytest.mark.parametrize("text", ["0s", "0.5ms", "1.5", "-5m", "nan", "infs", "", "s"])
def test_interval_setting_refuses_other_text(text: str) -> None:
    """A fraction of a step and a time shorter than any step are refused."""
    with pytest.raises(ConfigError, match=r"a number of steps \(100\), a time \(30s, 5m\) or auto"):
        IntervalSetting.parse(text)


def test_grace_variable_reaches_supervisors_in_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Supervisors parse a plain number, so the agent converts units."""
    monkeypatch.setattr("os.environ", {"ELASTIC_RESUME_GRACE_S": "1.5m"})
    settings = Settings.for_worker({}, "t.py")
    args = argparse.Namespace(grace=None, drain_signals=None)
    with contextlib.closing(LeasePage()) as fence, contextlib.closing(RoundEvents()) as told:
        main._set_environment(settings, args, tmp_path / "events.jsonl", fence, told)
    from elastic_resume.agent.workers.supervisor import read_grace_s  # noqa: PLC0415 - reads the environment when asked

    assert read_grace_s() == 90.0
