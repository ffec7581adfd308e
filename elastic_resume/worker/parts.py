"""Which part of a dictionary that somebody else saved is the model, which the optimizer; and what names mean.

Scripts agree on no keys. Those known here are the ones of PyTorch's tutorials and examples, timm, Lightning
and DETR; an object's own name comes first. A file that is one dict of tensors is a model's state_dict().
Where two keys could be meant nobody guesses: it is an error that names both.

Names of tensors are compared without ``module.`` and ``_orig_mod.``, wherever they stand: so it does not
matter which side was wrapped, in what, or how often.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_resume.errors import MismatchError
from elastic_resume.worker.contents import OURS, Contents, Stored, leaves

WRAPPERS = frozenset({"module", "_orig_mod"})
KEYS: Mapping[str, tuple[str, ...]] = {
    "model": ("state_dict", "model", "model_state_dict", "model_state", "net", "net_state_dict", "network"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optimizer_state", "optim", "opt", "optimizer_states"),
    "scheduler": (
        "scheduler",
        "scheduler_state_dict",
        "lr_scheduler",
        "lr_scheduler_state_dict",
        "lr_schedulers",
    ),
    "scaler": ("scaler", "scaler_state_dict", "grad_scaler", "grad_scaler_state_dict"),
    "ema": ("ema", "ema_state_dict", "ema_model", "model_ema", "state_dict_ema"),
}
EPOCH_KEYS = ("epoch", "epochs", "current_epoch")
STEP_KEYS = ("global_step", "step", "steps", "iteration", "iter", "it")


@dataclass(frozen=True)
class Part:
    """One object's state, and under which key of the file it stood."""

    key: str
    state: Any


def part_of(contents: Contents, name: str, modules: Sequence[str] = ("model",)) -> Part | None:
    """Find the state of the object ``name``; None where the file has none.

    Args:
        contents: of a checkpoint of any format.
        name: as in ``er.resume(model=…)``; ``model.g`` for one of a dict of several.
        modules: the names of all modules that are looked for. Where it is the only one, a file that is
            nothing but a state_dict is its.

    Raises:
        MismatchError: two keys could be meant.

    """
    tree = contents.tree
    if not isinstance(tree, dict):
        return None
    if contents.format == OURS:
        return Part(name, tree[name]) if name in tree else None
    group, _, inner = name.partition(".")
    tried = [name, f"{name}_state_dict"]
    if inner:
        tried += [inner, f"{inner}_state_dict"]
        for key in KEYS.get(group, (group,)):
            if isinstance(tree.get(key), dict) and isinstance(tree[key].get(inner), dict):
                return Part(f"{key}/{inner}", tree[key][inner])
    # A model's state has tensors: {"model": {"width": 64}, "state_dict": …} is not one of two models.
    least = 1 if name in modules or group in {"model", "ema"} else 0

    def fits(key: str) -> bool:
        return is_state(tree.get(key)) and tensors_in(tree[key]) >= least

    found = [key for key in tried if fits(key)][:1] or [key for key in KEYS.get(name, ()) if fits(key)]
    if len(found) > 1:
        raise MismatchError(
            f"{contents.path}: {' and '.join(map(repr, found))} could both be the {name}. Save the one that "
            f"is meant in a file of its own, as {{{name!r}: …}}, and nothing else of its kind."
        )
    if found:
        state = tree[found[0]]
        return Part(found[0], _numbered(state[0] if type(state) is list else state))
    return Part("", tree) if (list(modules) == [name] or name == "model") and is_bare(tree) else None


def _numbered(state: Any) -> Any:
    """DCP writes the numbers of an optimizer's parameters as strings; give them as numbers."""
    inner = state.get("state") if isinstance(state, dict) and "param_groups" in state else None
    if not isinstance(inner, dict) or not all(type(key) is str and key.isdecimal() for key in inner):
        return state
    return {**state, "state": {int(key): value for key, value in inner.items()}}


def is_state(value: Any) -> bool:
    """Whether this could be an object's state: a dict with something in it, or a list of one."""
    if type(value) is list and len(value) == 1:
        value = value[0]
    return isinstance(value, dict) and bool(value)


def is_bare(tree: Mapping[Any, Any]) -> bool:
    """Whether a whole file is one module's state_dict: names, and tensors right under them."""
    known = {key for keys in KEYS.values() for key in keys}
    return (
        any(isinstance(value, Stored) for value in tree.values())
        and all(type(key) is str for key in tree)
        and not any(isinstance(value, dict) and key in known for key, value in tree.items())
    )


def plain_name(name: str) -> str:
    """Give a tensor's name without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def without_wrappers(state: Any) -> Any:
    """Give a module's state with the names that its author wrote, as far as the file alone tells.

    ``_orig_mod.`` is nobody's own name and goes wherever it stands; ``module.`` only where all names begin
    with it, since a model may have a part that is called so.
    """
    if not isinstance(state, dict) or not all(type(key) is str for key in state):
        return state
    names = {key: ".".join(part for part in key.split(".") if part != "_orig_mod") for key in state}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {key: name.removeprefix("module.") for key, name in names.items()}
    return (
        {names[key]: value for key, value in state.items()}
        if len(set(names.values())) == len(state)
        else state
    )


def fitted(state: Mapping[str, Any], live: Iterable[str]) -> dict[str, Any]:
    """Give ``state`` under the live model's names where one fits, else under its own.

    A name that fits exactly does so; else the one that is alike without wrappers, if there is only one on
    either side.
    """
    live = list(live)
    found = {name: state[name] for name in live if name in state}
    rest = [name for name in state if name not in found]
    wanted = _by_plain_name(name for name in live if name not in found)
    offered = _by_plain_name(rest)
    for plain, names in offered.items():
        targets = wanted.get(plain, [])
        if len(names) == len(targets) == 1:
            found[targets[0]] = state[names[0]]
        else:
            found.update({name: state[name] for name in names})
    return found


def _by_plain_name(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(plain_name(name), []).append(name)
    return found


def count_of(tree: Mapping[Any, Any], keys: Iterable[str]) -> tuple[str, int] | None:
    """Give the first of ``keys`` that holds a count, and the count."""
    for key in keys:
        value = tree.get(key)
        if isinstance(value, Stored) and not value.shape and not value.dtype.is_floating_point:
            value = int(value.read())
        if type(value) is int and 0 <= value < 1 << 53:
            return key, value
    return None


def tensors_in(state: Any) -> int:
    """Count the tensors of a part."""
    return sum(isinstance(leaf, Stored) for _, leaf in leaves(state))
