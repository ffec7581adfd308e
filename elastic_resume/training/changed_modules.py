"""Find modules that training changes and no tracked object holds: a momentum teacher, a loss with a center.

Neither an optimizer nor the name of a class tells them. So samples of their tensors are compared over a few
steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from elastic_resume.state import dtensors
from elastic_resume.state.state_dict import type_name, unwrap
from elastic_resume.training.untracked import collect_held, find_storage, find_variable, is_average

SAMPLED = 64  # elements of one tensor


@dataclass(frozen=True)
class _Candidate:
    module: weakref.ref[nn.Module]
    samples: dict[str, Tensor]


class ChangedModules:
    """Samples of modules that are not within a tracked object."""

    def __init__(self, tracked: Mapping[str, Any], objects: list[Any]) -> None:
        """Take the samples of those among ``objects``; averages of weights have a warning of their own."""
        own = [item for item in tracked.values() if isinstance(item, nn.Module)]
        tensors = chain.from_iterable(chain(each.parameters(), each.buffers()) for each in own)
        known = {find_storage(dtensors.to_local(each)) for each in tensors if each.numel()}
        held = collect_held(tracked)
        modules = [item for item in objects if issubclass(type(item), nn.Module)]
        modules = [item for item in modules if id(item) not in held and not is_average(type(item))]
        inner = {id(child) for module in modules for child in module.children()}
        found = ((each, dict(_take_samples(each, known))) for each in modules if id(each) not in inner)
        self._candidates = [_Candidate(weakref.ref(module), samples) for module, samples in found if samples]

    def describe(self) -> list[str]:
        """Describe each module of which a tensor has changed since."""
        texts = []
        for candidate in self._candidates:
            module = candidate.module()
            if module is None:
                continue
            now = dict(_take_samples(module, set()))
            changed = [name for name, old in candidate.samples.items() if not _is_same(old, now.get(name))]
            if changed:
                name = f" ({variable})" if (variable := find_variable(module)) else ""
                texts.append(
                    f"a {type_name(unwrap(module))}{name} holds {changed[0]!r}, which the first steps have "
                    "changed, and er.resume() was not given it, so a resume would begin it anew: pass it in "
                    "a dict as model=, or in track=. Ignore this if training does not read it."
                )
        return texts


def _take_samples(module: nn.Module, known: set[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of some elements of the tensors whose memory is not ``known``."""
    for name, value in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(value) or type(value).__module__.partition(".")[0] != "torch":
            continue  # not there yet, or a kind of tensor that may not allow what follows
        tensor = dtensors.to_local(value.detach())
        if not tensor.numel() or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            continue
        if find_storage(tensor) not in known:
            yield name, tensor.flatten()[:: -(-tensor.numel() // SAMPLED)].clone()


def _is_same(old: Tensor, new: Tensor | None) -> bool:
    """Return whether two samples have the same bytes. One that is gone, or of another kind, is left out."""
    if new is None or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        return True
    return torch.equal(old.view(torch.uint8), new.view(torch.uint8))
