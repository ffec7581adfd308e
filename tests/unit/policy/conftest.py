"""Test decisions with random words in the place of all sentences: nothing may depend on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.random_words import random_words


@pytest.fixture(autouse=True, scope="module")
def _words_decide_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replace `policy.wording`, unless the module tests the sentences themselves."""
    pins = getattr(request.module, "PINS_SENTENCES", False)
    with contextlib.nullcontext() if pins else random_words():
        yield
