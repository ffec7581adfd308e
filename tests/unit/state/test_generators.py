"""Random generators are tracked as they are."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elastic_resume.checkpoint import json_codec
from elastic_resume.errors import UntrackableError
from elastic_resume.state.state_dict import collect_objects

KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "torch": (torch.Generator, lambda g: float(torch.randn(1, generator=g))),
    "python": (random.Random, lambda g: float(g.gauss(0, 1))),
    "numpy": (np.random.default_rng, lambda g: float(g.normal())),
    "numpy, MT19937": (
        lambda: np.random.Generator(np.random.MT19937()),
        lambda g: float(g.integers(1 << 20)),
    ),
    "numpy, Philox": (lambda: np.random.Generator(np.random.Philox()), lambda g: float(g.random())),
    "numpy, legacy": (np.random.RandomState, lambda g: float(g.normal())),
}


@pytest.mark.parametrize("kind", KINDS)
def test_generator_draws_the_same_after_a_load(kind: str) -> None:
    """Its state goes through what a checkpoint stores; the script's own object goes on."""
    make, draw = KINDS[kind]
    first, second = make(), make()
    draw(first)
    state = collect_objects({"generator": first})["generator"].state_dict()
    state = json_codec.decode(json.loads(json.dumps(json_codec.encode(state, "generator"))))
    collect_objects({"generator": second})["generator"].load_state_dict(state)
    assert [draw(second) for _ in range(5)] == [draw(first) for _ in range(5)]


def test_generator_of_the_system_is_refused() -> None:
    """It has no state."""
    with pytest.raises(UntrackableError, match="rng: SystemRandom draws from the system"):
        collect_objects({"rng": random.SystemRandom()})
