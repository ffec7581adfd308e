"""Whether a state that somebody else saved fits a live object, and what that object takes of it.

Promise: nothing live is changed here. Every difference is listed: names, shapes, dtypes of a module; groups,
settings and the shapes of what is kept per parameter of an optimizer; the fields of all else. Who gets
no difference gets a state that ``load_state_dict`` takes.

What torch itself adds to a state from one release to the next is no difference: settings that an older file
lacks stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_resume.worker import parts
from elastic_resume.worker.contents import Stored, Unreadable, leaves, replace_leaves
from elastic_resume.worker.restoring import OF_SCHEDULERS
from elastic_resume.worker.state import canonical_names, key_of, stored_form

# Kept per parameter, in the parameter's own shape; of other names nothing is known (Adafactor's are smaller).
_PARAMETER_SHAPED = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
    *("square_avg", "grad_avg", "acc_delta", "sum"),
}


@dataclass(frozen=True)
class Fit:
    """What an object takes, and what is in the way of that."""

    state: Any
    differences: tuple[str, ...] = ()


def fit(name: str, item: Any, state: Any, order: Sequence[Sequence[str]] = ()) -> Fit:
    """Compare ``state``, a tree with `Stored` tensors, with the live object ``item``.

    Args:
        name: of the object, for messages.
        item: a module, an optimizer, or anything with a state_dict().
        state: what a file has for it.
        order: of an optimizer: the names of its parameters, by group and number.

    """
    if not isinstance(state, dict):
        return Fit(state, (f"{name}: is a {type(state).__name__} in the file, not a state_dict()",))
    strange = tuple(
        f"{name}/{path}: is {leaf.what}" for path, leaf in leaves(state) if isinstance(leaf, Unreadable)
    )
    if strange:
        return Fit(state, strange)
    if isinstance(item, nn.Module):
        return _fit_module(name, item, state)
    if isinstance(item, Optimizer):
        return _fit_optimizer(name, item, state, order)
    return _fit_plain(name, item.state_dict(), state)


def read(tree: Any) -> Any:
    """Read the tensors of a tree; they share the file's memory."""
    return replace_leaves(tree, lambda leaf, _: leaf.read() if isinstance(leaf, Stored) else leaf)


def described(value: Any) -> str:
    """Say what stands at a name: dtype and shape of a tensor."""
    if value is None:
        return "absent"
    if isinstance(value, (Tensor, Stored)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "not a tensor"


# ---- modules -------------------------------------------------------------------------------------------


def _fit_module(name: str, module: nn.Module, state: Mapping[Any, Any]) -> Fit:
    canonical = canonical_names(module)
    whole = module.state_dict()
    live = {canonical(key): value for key, value in whole.items()}
    given = parts.fitted({str(key): value for key, value in state.items()}, live)
    for key, twin in _twins(live):  # safetensors files have only one of two tied names
        if key not in given and twin in given:
            given[key] = given[twin]
        elif twin not in given and key in given:
            given[twin] = given[key]
    differences = tuple(
        f"{name}/{key}: {described(live.get(key))} in the model, {described(given.get(key))} in the file"
        for key in sorted(live.keys() | given.keys())
        if described(live.get(key)) != described(given.get(key))
    )
    for key in whole if not differences else ():
        whole[key] = given[canonical(key)]  # which keeps the versions that modules look at when they load
    return Fit(whole, differences)


def _twins(live: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of names that are one tensor."""
    first: dict[Any, str] = {}
    pairs = []
    for name, value in live.items():
        if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
            stored_as, plain = stored_form(value)
            known = first.setdefault(key_of(plain, stored_as), name)
            if known != name:
                pairs.append((name, known))
    return pairs


# ---- optimizers ----------------------------------------------------------------------------------------


def _fit_optimizer(
    name: str, optimizer: Optimizer, state: Mapping[Any, Any], order: Sequence[Sequence[str]]
) -> Fit:
    groups, inner = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(inner, dict) or not all(map(_is_group, groups)):
        return Fit(state, (f"{name}: has no state and param_groups in the file",))
    live = optimizer.state_dict()["param_groups"]
    here, there = ([len(group["params"]) for group in of] for of in (live, groups))
    if here != there:
        return Fit(state, (f"{name}: groups of {here} parameters now, of {there} in the file",))
    numbers, differences = _numbers(name, live, groups, order)
    settings = []
    for at, (mine, theirs) in enumerate(zip(live, groups, strict=True)):
        lacking = [key for key in mine if key not in theirs and key not in OF_SCHEDULERS]
        strange = [key for key in theirs if key not in mine and key not in OF_SCHEDULERS]
        if lacking and strange:  # one of the two alone is another release of torch
            differences.append(
                f"{name}/param_groups/{at}: settings {', '.join(map(str, strange[:6]))} in the file, "
                f"{', '.join(map(str, lacking[:6]))} in the optimizer: is it of the same kind?"
            )
        own = {key: mine[key] for key in ("params", "param_names") if key in mine}
        taken = {key: value for key, value in theirs.items() if key != "param_names"}
        settings.append({**mine, **taken, **own})
    shapes = [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
    kept = {}
    for key, values in inner.items():
        number = numbers.get(key)
        if number is None or not isinstance(values, dict):
            differences.append(f"{name}/state/{key}: belongs to no parameter")
            continue
        kept[number] = values
        differences += [
            f"{name}/state/{key}/{word}: {list(value.shape)} in the file, its parameter {[*shapes[number]]}"
            for word, value in values.items()
            if word in _PARAMETER_SHAPED
            and isinstance(value, Stored)
            and value.shape != tuple(shapes[number])
        ]
    return Fit({**state, "state": kept, "param_groups": settings}, tuple(differences))


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("params"), (list, tuple))


def _numbers(
    name: str, live: Sequence[Any], groups: Sequence[Any], order: Sequence[Sequence[str]]
) -> tuple[dict[Any, int], list[str]]:
    """Give the live number of each parameter of the file, which may call them by number or by name."""
    numbers: dict[Any, int] = {}
    differences = []
    for at, (mine, theirs) in enumerate(zip(live, groups, strict=True)):
        names = [parts.plain_name(one.partition("/")[2]) for one in order[at]] if at < len(order) else []
        by_name = dict(zip(names, mine["params"], strict=False))
        given = _names_in(theirs)
        if given is None or not any(parts.plain_name(one) in by_name for one in given):
            if all(type(key) is str for key in theirs["params"]):
                differences.append(f"{name}/param_groups/{at}: has other parameters, by their names")
            numbers.update(zip(theirs["params"], mine["params"], strict=True))
            continue
        for key, called in zip(theirs["params"], given, strict=True):
            number = by_name.get(parts.plain_name(called))
            if number is None:
                differences.append(
                    f"{name}/param_groups/{at}: {called!r} is none of the optimizer's parameters"
                )
            else:
                numbers[key] = number
    return numbers, differences


def _names_in(group: Any) -> list[str] | None:
    """Give the names that a file has for a group's parameters; None where it has none."""
    for key in (
        "param_names",
        "params",
    ):  # torch numbers parameters and names them beside; DCP calls them by name
        names = group.get(key)
        named = isinstance(names, (list, tuple)) and all(type(one) is str for one in names)
        if named and names and len(names) == len(group["params"]):
            return list(names)
    return None


# ---- all else ------------------------------------------------------------------------------------------


def _fit_plain(name: str, live: Any, state: Mapping[Any, Any]) -> Fit:
    """A scheduler, a GradScaler, an object of the script's own: the same fields, whatever they hold."""
    if not isinstance(live, dict) or not live:
        return Fit(state)
    lacking = [key for key in live if key not in state and not _is_internal(key)]
    strange = [key for key in state if key not in live and not _is_internal(key)]
    differences = [f"{name}/{key}: absent in the file" for key in lacking]
    differences += [f"{name}/{key}: in the file, unknown to the object" for key in strange]
    differences += [
        f"{name}/{key}: {described(value)} in the object, {described(state[key])} in the file"
        for key, value in live.items()
        if isinstance(value, Tensor) and key in state and described(value) != described(state[key])
    ]
    taken = {key: state.get(key, value) for key, value in live.items()}
    return Fit(taken, tuple(differences))


def _is_internal(key: Any) -> bool:
    return str(key).startswith("_") or key == "verbose"
