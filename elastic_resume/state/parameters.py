"""Keep what a script decides about parameters: their order in optimizers, and which of them are trained.

Scripts change both while they train: they unfreeze layers, and give them to an optimizer as a new group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer

from elastic_resume.state.state_dict import make_name_canonicalizer

_BUILT_GROUPS = "elastic_resume.built_groups"  # a key beside the names of optimizers


def name_parameters(tracked: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Return the parameters of the tracked models by the names that a checkpoint has for them."""
    named: dict[str, nn.Parameter] = {}
    for name, item in tracked.items():
        if isinstance(item, nn.Module):
            canonical = make_name_canonicalizer(item)  # walks the whole model
            named |= {f"{name}/{canonical(key)}": p for key, p in item.named_parameters()}
    return named


class ParameterOrder:
    """The order of parameters in each optimizer, compared before anything is loaded.

    An optimizer's state refers to parameters by index. If the order changed, it would silently use one
    parameter's momentum for another of the same shape.
    """

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """Record the order in each optimizer, using the names of the tracked models."""
        self._parameters = name_parameters(tracked)
        self._name_by_parameter_id = {id(p): name for name, p in self._parameters.items()}
        self._optimizers = {name: item for name, item in tracked.items() if isinstance(item, Optimizer)}
        self._group_counts = {name: len(item.param_groups) for name, item in self._optimizers.items()}
        self._built_groups = self._group_counts  # when the job first started

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers: `state_dict` stays the same while their groups do."""
        return list(self._optimizers.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the parameter names of each optimizer and group; "" for a parameter that is not tracked."""
        return {**self._read_names(), _BUILT_GROUPS: self._built_groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the number of groups of the first start; `differences` compares the rest."""
        self._built_groups = state.get(_BUILT_GROUPS, self._built_groups)

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Describe each optimizer whose groups or parameters differ from the checkpoint's."""
        problems = []
        for name, all_groups in self._read_names().items():
            groups = all_groups[: self._group_counts[name]]  # without those of an attempt that failed
            stored_groups = stored.get(name, groups)
            if self._find_added(name, stored):
                stored_groups = stored_groups[: len(groups)]
            sizes, stored_sizes = list(map(len, groups)), list(map(len, stored_groups))
            if sizes != stored_sizes:
                problems.append(f"{name}: groups of {sizes} parameters now, {stored_sizes} in the checkpoint")
                continue
            pairs = zip(chain.from_iterable(groups), chain.from_iterable(stored_groups), strict=True)
            here, there = next(((a, b) for a, b in pairs if a != b), ("", ""))
            if here != there:
                problems.append(f"{name}: {here or 'a parameter'} stands where the checkpoint has {there!r}")
        return problems

    def prepare(self, stored: Mapping[str, Any]) -> None:
        """Add the groups that the run had added by add_param_group() before the state was saved."""
        for name, optimizer in self._optimizers.items():
            added = self._find_added(name, stored)
            del optimizer.param_groups[self._group_counts[name] :]
            takes_names = "param_names" in optimizer.param_groups[0]
            for names in added:
                parameters: list[Any] = [self._parameters[key] for key in names]
                if takes_names:  # the checkpoint's replace these
                    parameters = list(zip(names, parameters, strict=True))
                optimizer.add_param_group({"params": parameters})

    def _read_names(self) -> dict[str, list[list[str]]]:
        return {
            name: [
                [self._name_by_parameter_id.get(id(p), "") for p in group["params"]]
                for group in optimizer.param_groups
            ]
            for name, optimizer in self._optimizers.items()
        }

    def _find_added(self, name: str, stored: Mapping[str, Any]) -> list[list[str]]:
        """Return the names in the stored groups that an optimizer lacks, if they were added in the run.

        They were if the job had no more groups when it first started than the script builds now.
        """
        groups = self._optimizers[name].param_groups[: self._group_counts[name]]
        added: list[list[str]] = stored.get(name, [])[len(groups) :]
        if not added or len(groups) < stored.get(_BUILT_GROUPS, {}).get(name, len(groups) + 1):
            return []
        present = {id(p) for group in groups for p in group["params"]}
        found = [self._parameters.get(key) for names in added for key in names]
        return added if all(p is not None and id(p) not in present for p in found) else []


class FrozenParameters:
    """Which parameters of the tracked models are not trained (``requires_grad``)."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """Record the parameters. Those that are trained now may be in a DDP that the script has built."""
        self._parameters = name_parameters(tracked)
        self._was_trained = {name for name, p in self._parameters.items() if p.requires_grad}

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the frozen parameters."""
        return {"frozen": [name for name, p in self._parameters.items() if not p.requires_grad]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Freeze the parameters that were frozen, and no others."""
        frozen = set(state["frozen"])
        for name, parameter in self._parameters.items():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)

    def find_unfrozen(self, model: nn.Module) -> list[str]:
        """Return the parameters of ``model`` that are trained now, and were not when they were recorded."""
        ids = set(map(id, model.parameters()))
        return [
            name
            for name, p in self._parameters.items()
            if id(p) in ids and p.requires_grad and name not in self._was_trained
        ]

    @contextlib.contextmanager
    def thawed(self, name: str, ddp_keys: Collection[str] | None) -> Iterator[None]:
        """Let DDP see the parameters of a model that it has had in an undisturbed run.

        The state of a step boundary may have some of them frozen, as in a GAN that switches the flags in
        each step. ``ddp_keys`` are those whose gradients DDP has averaged, None if unknown.
        """
        frozen = [
            p
            for path, p in self._parameters.items()
            if path.startswith(f"{name}/")
            and path in self._was_trained
            and not p.requires_grad
            and (ddp_keys is None or path.removeprefix(f"{name}/") in ddp_keys)
        ]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
