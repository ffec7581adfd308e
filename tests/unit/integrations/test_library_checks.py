"""An integration refuses a library that it was not written for, at import."""

from __future__ import annotations

import pytest

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
