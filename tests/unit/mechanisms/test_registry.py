"""Test what the registry says of every mechanism."""

from __future__ import annotations

import functools
import importlib
from dataclasses import fields

import pytest

from elastic_resume.mechanisms.mechanism import Mechanism
from elastic_resume.mechanisms.registry import MECHANISMS


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=range(len(MECHANISMS)))
def test_what_is_imported_late_exists(mechanism: Mechanism) -> None:
    """Its module and name are texts, which no type checker reads."""
    values = [getattr(mechanism, field.name) for field in fields(mechanism)]
    values += [option.parse for option in mechanism.options]
    late = [value for value in values if isinstance(value, functools.partial)]
    for value in late:
        module, name = value.args
        assert callable(getattr(importlib.import_module(module), name))
    assert late or not mechanism.make_agent_part
