"""One walk over everything that is tracked, which finds what of it stays the same but for its values.

Goes in the order of `state.flatten` and with its `Walk`, so that names, ties and refusals are the same. What
cannot be known without asking becomes a question (`questions.py`), all else gets a guard (`guards.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from elastic_resume.store import typed
from elastic_resume.store.typed import TensorRef
from elastic_resume.worker.buckets import BucketOrder
from elastic_resume.worker.guards import (
    GroupsGuard,
    ModuleGuard,
    OptimizerGuard,
    Place,
    is_plain_module,
    is_plain_optimizer,
)
from elastic_resume.worker.parameters import ParameterOrder
from elastic_resume.worker.questions import Asked, Hyperparameters, Question, Volatile
from elastic_resume.worker.state import REPLICATED, Key, Leaf, Walk, flatten_object, key_of


@dataclass(frozen=True)
class Fixed:
    """The part of a state that changes in values only. A new one is made when anything else changes.

    Attributes:
        number: grows with each new one.
        leaves: the objects' own tensors, not detached, so that what ``p.data = x`` puts there is seen.
        static: typed JSON around them, by tracked name.
        overlapped: for each leaf, whether it may be copied after the look, until the next `step` of the
            optimizers: the state of optimizers that can be hooked, the parameters that they step, and those
            of a model called ``ema``. Nothing else: a forward pass changes buffers, embeddings with max_norm,
            and parameters that nobody steps (the second encoder of MoCo).

    """

    number: int
    leaves: tuple[Leaf, ...]
    static: dict[str, Any]
    overlapped: tuple[bool, ...]


@dataclass(frozen=True)
class Habits:
    """What was learnt of the tracked objects; it stays so."""

    asked: set[str] = field(default_factory=set)  # tracked names: share memory with what is asked each time
    volatile: set[str] = field(default_factory=set)  # paths of tensors that are replaced all the time
    # Tensors by name that were seen without requires_grad: in a GAN it comes and goes.
    frozen: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Owner:
    """A fixed tensor under the name that others tied to it refer to."""

    order: int
    leaf: Leaf
    stored_as: str

    @property
    def memory(self) -> Key:
        """Where it lies now, as `state.key_of` says it."""
        return key_of(self.leaf.tensor, self.stored_as)


class Making:
    """One walk over everything that is tracked, in the order of `state.flatten`."""

    def __init__(self, tracked: dict[str, Any], habits: Habits) -> None:
        self._tracked, self._habits = tracked, habits
        self._walk = Walk()
        self._order = 0
        self._parameters: dict[str, tuple[str, Tensor]] = {}  # leaf -> tracked name, parameter of a module
        self._plain: set[str] = set()  # tracked names of optimizers
        self._grouped: set[int] = set()
        self._asked_for: set[str] = set()  # names of tensors that are not fixed
        self.tangled: set[str] = set()
        self.guards: list[ModuleGuard | OptimizerGuard | GroupsGuard] = []
        self.orders: list[tuple[BucketOrder, int]] = []
        self.own: list[Tensor] = []
        self.others: list[Tensor] = []
        self.places: list[tuple[Place, Tensor]] = []
        self.owners: list[Owner] = []
        self.live: list[Leaf] = []
        self.questions: list[Question] = []
        self.static: dict[str, Any] = {}
        self.dynamic: dict[str, Any] = {}

    def run(self) -> None:
        """Walk. What is found does not hold when something is ``tangled``: ask for that, and walk again."""
        for name, item in self._tracked.items():
            self.static[name] = None  # keeps the place of what is asked
            if name in self._habits.asked or not self._add(name, item):
                self._ask(Asked(self._order, name, item))

    def _add(self, name: str, item: Any) -> bool:
        if isinstance(item, nn.Module):
            return is_plain_module(item) and self._add_module(name, item)
        if isinstance(item, Optimizer):
            return is_plain_optimizer(item) and self._add_optimizer(name, item)
        if type(item) is ParameterOrder:
            for optimizer in item.optimizers:
                self._guard_groups(optimizer)
        elif type(item) is BucketOrder:
            self.orders.append((item, item.revision))
        else:
            return False
        self.static[name] = flatten_object(self._walk, name, item)
        return True

    def fixed(self, number: int) -> Fixed:
        """Give what was found, after `run`."""
        leaves = tuple(owner.leaf for owner in self.owners)
        optimizers = {name: item for name, item in self._tracked.items() if isinstance(item, Optimizer)}
        hooked = {name for name, item in optimizers.items() if name in self._plain and _can_be_hooked(item)}
        stepped, otherwise = set[int](), set[int]()
        for name, item in optimizers.items():
            parameters = {id(parameter) for group in item.param_groups for parameter in group["params"]}
            (stepped if name in hooked else otherwise).update(parameters)
        stepped -= otherwise
        averaged = bool(hooked) and len(hooked) == len(optimizers)
        overlapped = tuple(self._may_wait(leaf.name, hooked, stepped, averaged) for leaf in leaves)
        return Fixed(number, leaves, self.static, overlapped)

    def _may_wait(self, leaf: str, hooked: set[str], stepped: set[int], averaged: bool) -> bool:
        if leaf not in self._parameters:  # optimizer state, or a buffer
            return leaf.split("/", maxsplit=1)[0] in hooked
        name, parameter = self._parameters[leaf]
        if name == "ema" or name.startswith("ema."):
            return averaged  # changed after each step, by whatever optimizer: all of them wait
        return id(parameter) in stepped and leaf not in self._habits.frozen

    def trained(self) -> list[Tensor]:
        """Give the parameters that nobody may freeze without being noticed."""
        found = self._parameters.items()
        return [parameter for leaf, (_, parameter) in found if leaf not in self._habits.frozen]

    def _add_module(self, name: str, module: nn.Module) -> bool:
        guard = ModuleGuard(name, module, self._habits.volatile)
        if not guard.plain or any(_is_lazy_view(place.tensor) for place in guard.places.values()):
            return False
        moving = _changed_by_forward(module)
        plain = {}
        for key, place in guard.places.items():
            tensor = place.tensor
            plain[key] = self._refer(name, place, self.own)
            if place.kind == REPLICATED:
                self._parameters.setdefault(plain[key].name, (name, tensor))
                if not tensor.requires_grad or id(tensor) in moving:
                    self._habits.frozen.add(plain[key].name)
        self.guards.append(guard)
        self.static[name] = typed.encode(plain, name)
        return True

    def _add_optimizer(self, name: str, optimizer: Optimizer) -> bool:
        guard = OptimizerGuard(name, optimizer, self._habits.volatile)
        standing = [place.tensor for inner in guard.places.values() for place in inner.values() if place]
        if any(map(_is_lazy_view, standing)):
            return False
        plain = {
            number: {key: place and self._refer(name, place, self.others) for key, place in inner.items()}
            for number, inner in guard.places.items()
        }
        self.guards.append(guard)
        self._guard_groups(optimizer)
        state = typed.encode(plain, f"{name}['state']")
        question = Hyperparameters(self._order, name, optimizer)
        before = len(self._walk.leaves)
        groups = question.begin(self._walk, self.dynamic)
        self._asked(question, before)
        self.static[name] = {"state": state, "param_groups": groups}
        self._plain.add(name)
        return True

    def _guard_groups(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._grouped:  # 0.3 ms for 20,000 parameters: once is enough
            self._grouped.add(id(optimizer))
            self.guards.append(GroupsGuard(optimizer))

    def _refer(self, name: str, place: Place, watched: list[Tensor]) -> TensorRef:
        tensor, before = place.tensor, len(self._walk.leaves)
        reference = self._walk.refer(tensor, place.path, place.kind)
        if place.path in self._habits.volatile:
            spec = (tensor.dtype, tensor.shape)
            self._asked(Volatile(self._order, place, reference, spec), before)
            return reference
        if reference.name in self._asked_for:
            self.tangled.add(name)
        watched.append(tensor)
        self.places.append((place, tensor))
        if len(self._walk.leaves) > before:
            leaf = self._walk.leaves[-1]
            leaf = leaf if tensor.is_complex() else Leaf(leaf.name, tensor, leaf.kind)
            self.owners.append(Owner(self._order, leaf, reference.kind))
            self._order += 1
        return reference

    def _ask(self, question: Asked) -> None:
        before = len(self._walk.leaves)
        question.ask(self._walk, self.dynamic)
        self._asked(question, before)

    def _asked(self, question: Question, before: int) -> None:
        new = self._walk.leaves[before:]
        self._order += 1
        self.questions.append(question)
        self.live += new
        self._asked_for.update(leaf.name for leaf in new)


def _is_lazy_view(tensor: Tensor) -> bool:
    """Whether what is stored of it is a copy."""
    return type(tensor) in {Tensor, nn.Parameter} and (tensor.is_conj() or tensor.is_neg())


def _changed_by_forward(module: nn.Module) -> set[int]:
    """Find parameters that the forward pass changes: of embeddings with max_norm."""
    parts = [part for part in module.modules() if getattr(part, "max_norm", None) is not None]
    return {id(parameter) for part in parts for parameter in part.parameters(recurse=False)}


def _can_be_hooked(optimizer: Optimizer) -> bool:
    """Whether a hook runs before each step, and only there are parameters changed.

    LBFGS takes many steps in one, and evaluates the model between them.
    """
    return not isinstance(optimizer, LBFGS) and getattr(type(optimizer).step, "hooked", False) is True
