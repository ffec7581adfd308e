"""Keep the hooks that a script registers, and run those for the start of a generation."""

from __future__ import annotations

from collections.abc import Callable


class ScriptHooks:
    """Hooks of one process, in the order of registration."""

    def __init__(self, after: Callable[[], None]) -> None:
        """``after`` is called when the hooks have run."""
        self._after = after
        self._permanent: list[Callable[[], None]] = []  # each adds its hook again in a later generation
        self._waiting: list[Callable[[], object]] | None = None  # None after the hooks have run

    def begin_generation(self) -> None:
        """Begin a generation that has not started training."""
        self._waiting = []

    def add_again(self) -> None:
        """Add the permanent hooks to a later generation."""
        for add in self._permanent:
            add()

    def register(self, add: Callable[[], None], *, is_permanent: bool) -> None:
        """Register ``add``, which adds a hook if the generation needs it; call it now.

        A restartable function registers its hooks again in each generation, so they are not permanent.
        """
        if is_permanent:
            self._permanent.append(add)
        add()

    def add(self, hook: Callable[[], object]) -> None:
        """Add a hook to this generation, or run it now if the generation has started training."""
        if self._waiting is None:
            hook()
        else:
            self._waiting.append(hook)

    def run(self) -> None:
        """Run the hooks once, before the generation's first epoch, step or save."""
        if self._waiting is None:
            return
        hooks, self._waiting = self._waiting, None
        for hook in hooks:
            hook()
        self._after()
