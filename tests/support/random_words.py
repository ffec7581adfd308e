"""Replace every function that makes sentences by one that returns random words."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from elastic_resume.policy import wording


@contextlib.contextmanager
def random_words(seed: int = 0, words: Sequence[str] = ()) -> Iterator[None]:
    """Let all functions of `policy.wording` return random words, or some of ``words``, wherever they are."""
    rng = random.Random(seed)

    def make_words(*_: Any, **__: Any) -> str:
        if words:
            return " ".join(rng.choices(words, k=rng.randrange(1, 4)))
        return " ".join("".join(rng.choices("abcdefgh .:'it", k=6)) for _ in range(rng.randrange(4)))

    def make_lines(*_: Any, **__: Any) -> list[str]:
        return [make_words() for _ in range(rng.randrange(4))]

    makers = {
        function: make_lines if inspect.signature(function).return_annotation == "list[str]" else make_words
        for function in vars(wording).values()
        if inspect.isfunction(function) and function.__module__ == wording.__name__
    }
    with pytest.MonkeyPatch.context() as patch:
        for module in [module for name, module in sys.modules.items() if name.startswith("elastic_resume")]:
            for name, value in list(vars(module).items()):
                if inspect.isfunction(value) and value in makers:
                    patch.setattr(module, name, makers[value])
        yield
