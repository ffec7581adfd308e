"""Compute a model's forward and backward pass beside the training, and leave no trace of it.

The parts of the model get copies of their parameters and buffers for that time, so neither a gradient nor a
hook of DDP is touched. Afterwards all attributes of the parts, the random numbers and torch's settings are as
before; `plain_state` restores what attributes hold. Hooks of the script do not run. The gradients of the
outputs are random numbers from the seed: what is compared needs no loss.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from elastic_resume.mechanisms.compute_check import plain_state
from elastic_resume.mechanisms.compute_check.request import NotCheckable, Request, decode, find_tensors

WORDS_PER_ROW = 1024
_GLOBAL_HOOKS = (
    "_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_pre_hooks",
    "_global_forward_hooks",
)  # fmt: skip
# Others of a part: the flags by id of hook, which do nothing alone.
_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_pre_hooks", "_forward_hooks")


def compute(
    module: nn.Module, request: Request, tensors: Sequence[Tensor], *, is_strict: bool
) -> dict[str, str]:
    """Return the digests of the outputs, and of each parameter's gradient by its name.

    ``tensors`` are those of ``request``. ``is_strict``: fail where torch knows no deterministic algorithm;
    else take one where there is one.

    Raises:
        Exception: whatever the model raises.

    """
    device = next(module.parameters()).device
    with _settings(request, device, is_strict=is_strict), _random_numbers(request.seed, device):
        pairs = zip(tensors, request.formats, strict=True)
        arguments = [tensor.clone().requires_grad_(form.requires_grad) for tensor, form in pairs]
        with _replaced_parts(module, request, arguments) as parameters:
            outputs = module(*decode(request.arguments, arguments), **decode(request.keywords, arguments))
            found = [tensor for tensor in find_tensors(outputs) if tensor.requires_grad]
            if not found:
                raise NotCheckable("no output of the model has a gradient")
            # As large as those of a mean over the elements, also where half precision ends.
            gradients = [torch.randn_like(tensor) * max(1, tensor.numel()) ** -0.5 for tensor in found]
            torch.autograd.backward(found, gradients)
        results = {f"output {index}": tensor for index, tensor in enumerate(found)}
        results |= {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return {name: digest_tensor(tensor) for name, tensor in results.items()}


def digest_tensor(tensor: Tensor) -> str:
    """Return a digest of a tensor's bytes; a GPU sums up its rows, and sends a thousandth of the bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if flat.device.type != "cpu":
        flat = sum_rows(flat).cpu().view(torch.uint8)
    digest = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(ctypes.string_at(flat.data_ptr(), flat.numel()))
    return digest.hexdigest()


def sum_rows(data: Tensor) -> Tensor:
    """Return a number for each 8 KiB: the sum of its words, each times an odd number of its column.

    It is modulo 2^64, so another word always changes it, and several nearly always do.
    """
    rows = nn.functional.pad(data, (0, -data.numel() % (8 * WORDS_PER_ROW))).view(torch.int64)
    columns = torch.arange(WORDS_PER_ROW, device=data.device) * 0x1E3779B97F4A7C15 | 1
    return (rows.view(-1, WORDS_PER_ROW) * columns).sum(1)


def list_state(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield path, name and value of each tensor that the model's parts hold beside parameters."""
    for path, part in module.named_modules():
        own = {**vars(part), **part._buffers}  # noqa: SLF001
        yield from ((path, name, value) for name, value in own.items() if isinstance(value, Tensor))


def read_modes(module: nn.Module) -> str:
    """Return a 1 for each part in training mode, else a 0."""
    return "".join("01"[part.training] for part in module.modules())


@contextlib.contextmanager
def _replaced_parts(
    module: nn.Module, request: Request, tensors: Sequence[Tensor]
) -> Iterator[Mapping[str, Tensor]]:
    """Give the parts of a model other tensors, and no hooks of the script; yield the new parameters."""
    parts = dict(module.named_modules())
    if len(parts) != len(request.modes):
        raise NotCheckable(f"it has {len(parts)} parts here, and {len(request.modes)} on rank 0")
    new: dict[Tensor, nn.Parameter] = {
        p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in module.parameters()
    }
    state = tensors[len(tensors) - len(request.state) :]
    with contextlib.ExitStack() as cleanup:
        for restore in plain_state.save(module, request.seed, new):
            cleanup.callback(restore)
        for parameter in new:  # code that finds one elsewhere gives it no gradient
            cleanup.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        for part, mode in zip(parts.values(), request.modes, strict=True):
            cleanup.callback(_restore_attributes, part, dict(vars(part)))
            own: dict[str, Any] = vars(part)
            own["_parameters"] = {name: new.get(p) for name, p in part._parameters.items()}  # noqa: SLF001
            own["_buffers"] = dict(part._buffers)  # noqa: SLF001
            own["_modules"] = dict(part._modules)  # noqa: SLF001
            own["training"], own["_compiled_call_impl"] = mode == "1", None
            for name in _HOOKS:
                own[name] = type(own[name])((key, hook) for key, hook in own[name].items() if _is_torch(hook))
        for (path, name), tensor in zip(request.state, state, strict=True):
            attributes: Any = vars(parts[path])
            (attributes["_buffers"] if name in attributes["_buffers"] else attributes)[name] = tensor
        yield dict(module.named_parameters())


def _restore_attributes(part: nn.Module, before: dict[str, Any]) -> None:
    own = vars(part)
    for name in own.keys() - before.keys():
        del own[name]
    own.update(before)


def _is_torch(hook: Any) -> bool:
    """Whether a hook is torch's own, such as that of weight_norm, without which a weight is not computed."""
    name = getattr(hook, "__module__", None) or type(hook).__module__
    return str(name).startswith("torch.")


@contextlib.contextmanager
def _random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all generators, and restore them on exit."""
    plain, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    # A model may draw on, and seed, other GPUs too.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(plain)
            if numpy is not None:
                numpy.random.set_state(arrays)


@contextlib.contextmanager
def _settings(request: Request, device: torch.device, *, is_strict: bool) -> Iterator[None]:
    """Compute as rank 0 did, but deterministically, without torch.compile and without global hooks."""
    cudnn: Any = torch.backends.cudnn
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        cleanup.callback(torch.use_deterministic_algorithms, was_deterministic, warn_only=warned_only)
        torch.use_deterministic_algorithms(True, warn_only=not is_strict)
        if device.type == "cuda":
            for name, value in (("benchmark", False), ("deterministic", True)):
                cleanup.callback(setattr, cudnn, name, getattr(cudnn, name))
                setattr(cudnn, name, value)
        for name in _GLOBAL_HOOKS:
            hooks = getattr(torch_module, name)
            cleanup.callback(hooks.update, dict(hooks))
            hooks.clear()
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and its import takes a second
            cleanup.enter_context(torch.compiler.set_stance("force_eager"))
        cleanup.enter_context(torch.inference_mode(False))
        cleanup.enter_context(torch.enable_grad())
        for kind, is_on, dtype in request.autocast:
            cleanup.enter_context(torch.autocast(kind, getattr(torch, dtype), is_on, cache_enabled=False))
        yield
