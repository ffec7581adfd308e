"""What a script wants to be called for when a generation begins, in the order in which it said so."""

from __future__ import annotations

from collections.abc import Callable

Call = Callable[[], object]


class Hooks:
    """Calls that wait for the generation's first epoch, step or save; later ones are made at once."""

    def __init__(self) -> None:
        self._waiting: list[Call] = []
        self._began = False

    def add(self, call: Call) -> None:
        """Make ``call`` when the generation begins."""
        if self._began:
            call()
        else:
            self._waiting.append(call)

    def begin(self) -> None:
        """Make the calls, the first time."""
        if not self._began:
            self._began = True
            for call in self._waiting:
                call()
