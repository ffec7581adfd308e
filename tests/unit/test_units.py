"""Durations and sizes are parsed alike in all settings, and messages agree with their numbers."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_resume.agent import main
from elastic_resume.agent.failure_evidence import FailureEvents
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.config import OPTIONS, Settings, add_flags, parse_flags
from elastic_resume.errors import ConfigError
from elastic_resume.policy.checkpoint_interval import IntervalSetting
from elastic_resume.policy.restart import UNLIMITED
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.rendezvous.rendezvous_config import RendezvousConfig
from elastic_resume.restore.coordinator import ResumeResult
from elastic_resume.schedulers import environment
from elastic_resume.state.state_dict import FlatState
from elastic_resume.testing import chaos
from elastic_resume.training import announce
from elastic_resume.units import choose_verb, format_count, parse_duration, parse_kubernetes_quantity

FORMS = {"300": 300.0, "5m": 300.0, "30s": 30.0, "1.5h": 5400.0, " 45 ": 45.0, "90000ms": 90.0}
FORMS |= {"4.5e1": 45.0, "30.": 30.0}
NONSENSE = ["", " ", "-5", "-5s", "nan", "inf", "infs", "1e400", "5 minutes", "3 s", "5x", "s", "1.5.2"]
NONSENSE += ["e5", ".", "5\u0661"]


@pytest.mark.parametrize(
    ("given", "max_no_progress", "expected"),
    [(set(), None, 3), ({"max_restarts"}, None, UNLIMITED), ({"max_restarts"}, 2, 2), (set(), 2, 2)],
)
def test_max_no_progress_limits_beside_max_restarts(
    given: set[str], max_no_progress: int | None, expected: int
) -> None:
    """Alone, --max-restarts keeps torchrun's meaning."""
    args = argparse.Namespace(max_no_progress=max_no_progress, exclude_after=None, max_restarts=5)
    limits = main._read_limits(args, given)
    assert (limits.max_no_progress, limits.max_restarts) == (expected, 5 if given else UNLIMITED)


def _terms(text: str) -> float:
    terms = RendezvousConfig.parse(
        "localhost:0", {"join_timeout": text}, {}, run_id="r", nnodes=(1, 1), local_addr="127.0.0.1"
    )
    return terms.settings.join_timeout_s


def _option(name: str) -> Callable[[str], float]:
    (option,) = (option for option in OPTIONS if option.name == name)
    return lambda text: float(option.parse(name, text))


READERS: dict[str, Callable[[str], float | None]] = {
    "--grace": _option("grace"),
    "ELASTIC_RESUME_STEP_MARK_S": lambda text: Settings.for_worker({}, "t.py", step_mark_s=text).step_mark_s,
    "TERMINATION_GRACE_S": lambda text: environment.read_termination_grace_s(
        {"ELASTIC_RESUME_TERMINATION_GRACE_S": text}
    ),
    "--hang-timeout": _option("hang-timeout"),
    "--node-timeout": _option("node-timeout"),
    "--rdzv-conf": _terms,
    "chaos --patience": lambda text: float(chaos.build_parser().parse_args(["--patience", text]).patience),
}
# An empty variable counts as not set.
UNSET = {"TERMINATION_GRACE_S"}


@pytest.mark.parametrize("where", READERS)
def test_duration_forms_are_equal_in_all_settings(where: str) -> None:
    """A bare number is seconds, and every unit is accepted."""
    for text, seconds in FORMS.items():
        assert READERS[where](text) == pytest.approx(seconds), text


@pytest.mark.parametrize("where", READERS)
def test_invalid_duration_is_refused_in_all_settings(where: str) -> None:
    """Empty, negative, not finite or with an unknown unit."""
    for text in NONSENSE:
        if where not in UNSET or text.strip():
            with pytest.raises((ConfigError, argparse.ArgumentTypeError)):
                READERS[where](text)


@pytest.mark.parametrize("value", [10 / 3, 0.1 + 0.2, 1e-05, 1e3, 5, 1e9])
def test_duration_from_number_is_exact(value: float) -> None:
    """The rendezvous configuration holds floats, and scripts print all digits."""
    assert parse_duration("--grace", value) == value
    assert parse_duration("--grace", f"{value!r}ms") == value * 0.001


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-05, 1e300])
def test_duration_from_invalid_number_is_refused(value: float) -> None:
    """The rules are those of text."""
    with pytest.raises(ConfigError):
        parse_duration("--grace", value)


def test_duration_error_names_setting_value_and_forms() -> None:
    """The message needs no manual."""
    with pytest.raises(ConfigError) as error:
        parse_duration("--grace", " 5x", min_s=1, max_s=60)
    assert str(error.value) == (
        "--grace is '5x': write a time in seconds (30) or with a unit (500ms, 30s, 5m, 1.5h)."
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
        parse_duration("--grace", text, **limits)
    assert str(error.value) == f"--grace is {text!r}: write a time {said}."


@pytest.mark.parametrize("flag", ["--mtbf", "--for", "--patience"])
def test_chaos_duration_error_names_flag(flag: str) -> None:
    """Several flags of chaos are durations."""
    with pytest.raises(ConfigError, match=rf"^{flag} is '5x': write a time in seconds"):
        chaos.build_parser().parse_args([flag, "5x", "--", "train.py"])


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
    monkeypatch.setattr("os.environ", {"ELASTIC_RESUME_GRACE": "1.5m"})
    parser = argparse.ArgumentParser()
    add_flags(parser)
    args, _ = parse_flags(parser, [], os.environ)
    settings = Settings.for_worker({}, "t.py")
    with contextlib.closing(LeasePage()) as lease_page, contextlib.closing(FailureEvents()) as events:
        main._set_environment(settings, args, tmp_path / "events.jsonl", lease_page, events)
    from elastic_resume.agent.workers.supervisor import read_grace_s  # noqa: PLC0415 - reads the environment when asked

    assert read_grace_s() == 90.0


@pytest.mark.parametrize(
    ("text", "size"),
    [("4Gi", 4 << 30), ("512Mi", 512 << 20), ("1.5Gi", 3 << 29), ("2G", 2 * 10**9), ("7k", 7000), ("7", 7)],
)
def test_kubernetes_quantity_accepts_binary_and_decimal_units(text: str, size: int) -> None:
    """Kubernetes reads G as a power of ten, unlike our flags."""
    assert parse_kubernetes_quantity("limit", text) == size


@pytest.mark.parametrize("text", ["lots", "4GB", "4gi", "-1Gi", "512m", "0", "Gi", "9Ei", "1e9", "\u0664Gi"])
def test_kubernetes_quantity_refuses_other_text(text: str) -> None:
    """Kubernetes accepts 512m, which is half a byte."""
    with pytest.raises(ConfigError, match=r"limit is .*: write a size as 4Gi"):
        parse_kubernetes_quantity("limit", text)


@pytest.mark.parametrize(("count", "said"), [(0, "0 steps are"), (1, "1 step is"), (2, "2 steps are")])
def test_format_count_and_verb_follow_number(count: int, said: str) -> None:
    """Zero is plural."""
    assert f"{format_count(count, 'step')} {choose_verb(count, 'is', 'are')}" == said
    assert format_count(1, "batch", "batches") == "1 batch"
    assert format_count(count, "batch", "batches") == ("1 batch" if count == 1 else f"{count} batches")


@pytest.mark.parametrize(
    ("lost", "said"),
    [(0, "no step lost"), (1, "; 1 step to recompute;"), (2, "; 2 steps to recompute;")],
)
def test_resume_line_counts_recomputed_steps(lost: int, said: str) -> None:
    """Rank 0 prints the line."""
    plan = ResumePlan("resumed", 2, 5, "n0", recomputed_steps=lost)
    resumed = ResumeResult(plan, None, FlatState((), {}), ("n0",), 0.1)
    line = announce.format_start(resumed, Position(0, 5, 5, 5), 1)
    assert said in line
    assert "resumed at step 5 from n0" in line
    assert "at step 5 (epoch 1) from" in announce.format_start(resumed, Position(1, 2, 5, 5), 1)
