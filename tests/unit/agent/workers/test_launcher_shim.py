"""What the launcher shim and the supervisor do without the modules `signal` and `json` agrees with both."""

from __future__ import annotations

import json
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.agent.workers import launcher_shim, supervisor


@pytest.mark.parametrize("number", [*signal.valid_signals()])
def test_signals_have_their_standard_names(number: int) -> None:
    """Signals with two names have the same one as in `signal`, and real-time signals have none."""
    known = {item.value: item.name for item in signal.Signals}
    assert supervisor.signal_name(number) == known.get(number, f"SIG{number}")


@given(
    st.dictionaries(
        st.text(),
        st.integers() | st.text() | st.lists(st.text()) | st.dictionaries(st.text(), st.lists(st.integers())),
    )
)
def test_requests_are_json(value: dict[str, object]) -> None:
    """Whatever text a request contains."""
    assert json.loads(launcher_shim.encode_json(value)) == value
