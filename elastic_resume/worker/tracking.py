"""What is tracked, looked at again at every step without walking it: `state.flatten` for snapshots.

Most of a state changes in values only. So its tensors, their names and the JSON around them are found once
and kept (`Fixed`), and each look only makes sure that nothing else has changed (`guards.py`). What has to be
asked each time comes beside it (`Sight`): hyperparameters of optimizers, and objects with a
state_dict() of their own.

Promise: the tensors of a look, and `store.note.merge` of its two pieces of JSON, are what `state.flatten`
gives at that moment: same names, dtypes, shapes, kinds and ties, and the same errors.

Measured: a look that finds nothing new takes 0.3 ms for 148 parameters of GPT-2 with Adam (592 tensors), and
15 to 40 ms for 80,000 tensors. So a look at many may leave most comparisons to another thread (`Sight.due`),
which makes them before the next step of the optimizers; a snapshot for which they do not hold counts for
nothing. What is exchanged at the step boundary and back behind it is then overlooked: the copy has the
tensors that stood there before and afterwards.

Does not know how anything is copied. Belongs to the training thread, at a step boundary.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from elastic_resume.worker import guards
from elastic_resume.worker.fixing import Fixed, Habits, Making, Owner
from elastic_resume.worker.questions import Changed
from elastic_resume.worker.state import Key, Leaf, Walk

# A tensor that is replaced by one like it twice in so many looks is taken for one that always will be (a
# buffer that forward() assigns, ASGD's eta): it is asked for at each look, and the rest stays fixed.
OFTEN_LOOKS = 10
# Comparisons are left for later from so many tensors on: below, they take a millisecond in all.
MANY = 4000
# And only after so many looks have found nothing new: what a script replaces at each step shows by then.
SETTLED_LOOKS = 2
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Sight:
    """The tracked state at one moment.

    Attributes:
        fixed: the very same object as last time while nothing but values has changed.
        live: tensors that were asked for now. Copy them at once; next time they may be others.
        dynamic: typed JSON that goes over ``fixed.static`` (`store.note.merge`), by tracked name.
        due: comparisons that were left for later: the sight is true if all of them hold. Make them once,
            before the optimizers step and before the next look, which is whole if one does not.

    """

    fixed: Fixed
    live: tuple[Leaf, ...]
    dynamic: dict[str, Any]
    due: Iterator[bool] | None = None

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All tensors of the state."""
        return self.fixed.leaves + self.live


def without_collection(work: Callable[P, T]) -> Callable[P, T]:
    """Have ``work`` done without the collector of cycles: it makes many objects, and all of them stay.

    For 20,000 tensors half of the time of the first look went into looking for garbage.
    """

    @functools.wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> T:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return work(*args, **kwargs)
        finally:
            if collecting:
                gc.enable()

    return done


class Tracker:
    """Looks at the same tracked objects again and again."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """``tracked`` is what `state.collect` gave."""
        self._tracked = dict(tracked)
        self._built: _Built | None = None
        self._number = self._looks = 0
        self._habits = Habits()
        self._replaced: dict[str, int] = {}  # path -> at which look another tensor like it stood there
        self._held = 0  # looks since something was new
        self.doubted = False  # what a look had left for later did not hold
        self._patient = True

    def look(self, *, whole: bool = True) -> Sight:
        """Say what the state is now. Not ``whole``: comparisons may be left for later.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        self._looks += 1
        built, self._built = self._built, None  # stays None if an object refuses
        whole = whole or self.doubted or not self._patient or self._held < SETTLED_LOOKS
        whole = whole or built is None or len(built.fixed.leaves) < MANY
        doubted, self.doubted = self.doubted, False
        if built is not None and built.holds(whole=whole):
            try:
                walk, dynamic = built.ask()
            except Changed:
                pass
            else:
                self._built = built
                self._held += 1
                # What is exchanged only while a step runs (torch.func.functional_call) would be so again.
                self._patient = self._patient and not doubted
                return Sight(built.fixed, tuple(walk.leaves), dynamic, None if whole else self._due(built))
        if built is not None:
            self._learn(built)
        return self._build()

    def _due(self, built: _Built) -> Iterator[bool]:
        try:
            for holds in built.checks():
                self.doubted = not holds
                yield holds
        except (RuntimeError, LookupError):  # training changes a dict that is being read
            self.doubted = True
            yield False

    @without_collection
    def _build(self) -> Sight:
        self._number += 1
        self._held = 0
        while True:
            making = Making(self._tracked, self._habits)
            making.run()
            if not making.tangled:
                break
            self._habits.asked.update(making.tangled)
        self._built = _Built(making, making.fixed(self._number))
        return Sight(self._built.fixed, tuple(making.live), making.dynamic)

    def _learn(self, built: _Built) -> None:
        for path in built.replaced():
            if self._looks - self._replaced.get(path, -OFTEN_LOOKS) < OFTEN_LOOKS:
                self._habits.volatile.add(path)
            self._replaced[path] = self._looks


class _Built:
    """A `Fixed` with all that is needed to see whether it still holds."""

    def __init__(self, making: Making, fixed: Fixed) -> None:
        self.fixed = fixed
        self._guards = making.guards
        self._watch = guards.Watch(making.own, making.others, making.trained())
        self._questions = making.questions
        self._owners = making.owners
        self._places = making.places
        self._orders = making.orders
        self._known: dict[Key, Owner] | None = None
        self._asking = 0

    def holds(self, *, whole: bool) -> bool:
        """Not ``whole``: as far as it shows at a glance; `checks` makes sure."""
        if not all(order.revision == revision for order, revision in self._orders):
            return False
        if not whole:
            return all(next(guard.checks()) for guard in self._guards)
        checks = chain.from_iterable(guard.checks() for guard in self._guards)
        return all(checks) and self._watch.holds(self._forget, guards.COMPARED_EACH_LOOK)

    def checks(self) -> Iterator[bool]:
        return chain(*(guard.checks() for guard in self._guards), self._watch.checks(self._forget))

    def ask(self) -> tuple[Walk, dict[str, Any]]:
        walk, dynamic = Walk(self._name_of), {}  # type: tuple[Walk, dict[str, Any]]
        for question in self._questions:
            self._asking = question.order
            question.ask(walk, dynamic)
        return walk, dynamic

    def replaced(self) -> list[str]:
        """Give the paths where another tensor of the same dtype and shape stands now."""
        found = []
        for place, tensor in self._places:
            now = place.holder.get(place.key)
            if now is not tensor and isinstance(now, Tensor):
                same = now.dtype == tensor.dtype and now.shape == tensor.shape
                found += [place.path] if same else []
        return found

    def _forget(self) -> None:
        self._known = None

    def _name_of(self, key: Key) -> str | None:
        if self._known is None:
            self._known = {owner.memory: owner for owner in self._owners}
        owner = self._known.get(key)
        if owner is None:
            return None
        # What comes first gives the name; and optimizer state may have moved since it was noted.
        if owner.order > self._asking or owner.memory != key:
            raise Changed
        return owner.leaf.name
