"""What integrations share: a library that they were not written for is refused, and numbers are logged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_resume import integrations
from elastic_resume.errors import MachineError


@pytest.mark.parametrize(
    ("library", "range_", "message"),
    [
        ("no-such-library", ("1.0", "2.0"), "needs no-such-library from 1.0 to below 2.0, which is not"),
        ("pytest", ("1.0", "2.0"), r"pytest is .*, and this elastic_resume works with 1.0 to below 2.0"),
    ],
)
def test_other_version_is_refused(library: str, range_: tuple[str, str], message: str) -> None:
    """The error names the range of versions."""
    with pytest.raises(MachineError, match=message):
        integrations.require_versions(library, *range_)


@pytest.mark.parametrize(
    ("class_name", "name", "parameter"),
    [("Cookies", "close", ""), ("Path", "unknown", ""), ("Path", "rename", "source")],
)
def test_other_method_is_refused(class_name: str, name: str, parameter: str) -> None:
    """Its class, the method itself or a parameter is missing."""
    integrations.require_methods("os", "1.0", "2.0", {"pathlib.Path": ("rename target", "parent")})
    with pytest.raises(MachineError, match=rf"os has another {class_name}\.{name} than .* 1\.0"):
        integrations.require_methods("os", "1.0", "2.0", {f"pathlib.{class_name}": (f"{name} {parameter}",)})


def test_numbers_of_a_library_are_logged_for_their_step() -> None:
    """Texts, dicts and pictures are left out; its number of the last step is the job's."""
    logged: list[tuple[dict[str, Any], bool]] = []

    def log(values: dict[str, Any], *, of_last_step: bool, may_drop: bool) -> None:
        assert may_drop
        logged.append(({name: float(value) for name, value in values.items()}, of_last_step))

    progress = SimpleNamespace(position=SimpleNamespace(step=7))
    run: Any = SimpleNamespace(_generation=SimpleNamespace(log=log, progress=progress))
    numbers = {"a": 1, "b": np.float32(0.5), "c": torch.tensor([2.0]), "d": True, "e": float("inf")}
    others = {"f": "text", "g": {"h": 1.0}, "i": torch.zeros(2), "j": None, "k": torch.tensor(1j)}
    for step in (7, 8, 3, None):
        integrations.log_numbers(run, {**numbers, **others}, step)
    integrations.log_numbers(run, others)
    expected = {"a": 1.0, "b": 0.5, "c": 2.0, "d": 1.0, "e": float("inf")}
    assert logged == [(expected, True), (expected, False), (expected, False), (expected, False)]
