"""Notices an optimizer that moves tracked parameters and is not tracked: its state would be lost in silence.

One that was built after `er.resume`, say, or is wrapped by one whose state_dict() does not give its state. It
is looked at once, when it first holds tensors; one without any has nothing to lose.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic_resume import console
from elastic_resume.state import state_dict


class UntrackedOptimizerCheck:
    """Looks at every optimizer of the process after its steps, until `close`."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """``tracked`` is what `state.collect` gave."""
        self._tracked = dict(tracked)
        mine = [item for item in tracked.values() if isinstance(item, Optimizer)]
        self._checked_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet(mine)
        self._hook = register_optimizer_step_post_hook(self._check_optimizer)

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()

    def _check_optimizer(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer in self._checked_optimizers or not optimizer.state:
            return
        self._checked_optimizers.add(optimizer)
        held = {
            value.data_ptr()
            for inner in optimizer.state.values()
            for value in (inner.values() if isinstance(inner, dict) else ())
            if isinstance(value, Tensor) and value.numel()
        }
        name = self._find_stepped_model(optimizer)
        if not held or name is None:
            return
        # A wrapper that is tracked may give what is in it.
        kept = {leaf.tensor.data_ptr() for leaf in state_dict.flatten(self._tracked).leaves}
        if not held <= kept:
            console.say(
                f"WARNING: {state_dict.type_name(optimizer)} moves parameters of {name!r}, and its state is not "
                "tracked: a resume would begin without it. Build it before er.resume() and pass it as "
                "optimizer=."
            )

    def _find_stepped_model(self, optimizer: Optimizer) -> str | None:
        moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        modules = ((name, item) for name, item in self._tracked.items() if isinstance(item, nn.Module))
        return next((name for name, item in modules if any(id(p) in moved for p in item.parameters())), None)
