"""A fake GPU: CPU tensors that count as CUDA tensors, and streams that run late.

It checks the order in which the product records events, copies and waits. What CUDA itself does (memory, its
allocator, real concurrency) needs a real GPU. Work of the training stream runs at once. Copies in other
streams run when somebody waits for their event, so that a missing wait shows as a torn snapshot.

The result of an operation is on the CPU, except those of ``clone`` and ``to`` and of new tensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_resume.capture import direct_write
from elastic_resume.state import state_dict

TIMEOUT_S = 20.0


class FakeEvent:
    """An event of a stream."""

    def __init__(self, gpu: FakeGpu, *, blocking: bool = False) -> None:
        self.gpu, self.is_done, self.blocking = gpu, threading.Event(), blocking
        self.stream = gpu.training_stream

    def synchronize(self) -> None:
        """Wait in the host."""
        assert self.blocking, "a waiting thread would spin"
        if not self.gpu.is_slow:
            self.stream.run()
        assert self.is_done.wait(TIMEOUT_S), "the training stream never waited for the copies"


class FakeStream:
    """Work in the order in which it was enqueued."""

    def __init__(self, gpu: FakeGpu, *_: object) -> None:
        self.gpu, self.lock = gpu, threading.Lock()
        self.work: list[Callable[[], None]] = []
        self.newest_wait: FakeEvent | None = None

    def run(self) -> None:
        """Do all work."""
        with self.lock:
            while self.work:
                self.work.pop(0)()

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Mark the end of the work so far."""
        event = event or FakeEvent(self.gpu)
        event.stream = self
        self.work.append(event.is_done.set)
        if self is self.gpu.training_stream:
            self.gpu.newest_start = event
            self.run()
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """Run later work after ``event``."""
        self.newest_wait = event
        if self is self.gpu.training_stream:
            event.stream.run()


class FakeGpu:
    """One GPU, of CPU memory."""

    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_slow = self.is_capturing = False
        self.training_stream: FakeStream = FakeStream(self)
        self.newest_start: FakeEvent | None = None
        self._own: dict[int, Tensor] = {}  # by the address of its memory, which it keeps
        self._recorded: set[int] = set()
        self._side = threading.local()
        self._generators = (torch.Generator(), torch.Generator())
        self._patch(monkeypatch)

    def put(self, tensor: Tensor) -> Tensor:
        """Return a tensor with these values on the GPU."""
        return self._keep(torch._C.TensorBase.clone(tensor))

    def place(self, module: torch.nn.Module) -> None:
        """Move the parameters and buffers of ``module`` to the GPU."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._keep(tensor)

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Delay the copies that are enqueued in this context."""
        self.is_slow = True
        yield
        self.is_slow = False

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph."""
        self.is_capturing = True
        yield

    def get_seeds(self) -> list[int]:
        """Return the seed of each GPU's generator."""
        return [generator.initial_seed() for generator in self._generators]

    def _clone(self, tensor: Tensor, **how: Any) -> Tensor:
        clone = torch._C.TensorBase.clone(tensor, **how)
        return self._keep(clone) if self._has(tensor) else clone

    def _keep(self, tensor: Tensor) -> Tensor:
        self._own[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    def _has(self, tensor: Tensor) -> bool:
        return torch._C.TensorBase.untyped_storage(tensor).data_ptr() in self._own

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        base = torch._C.TensorBase
        patch = partial(monkeypatch.setattr, raising=False)
        find_device = base.device.__get__
        patch(Tensor, "is_cuda", property(self._has))
        patch(Tensor, "device", property(lambda t: self.device if self._has(t) else find_device(t)))
        patch(Tensor, "clone", lambda t, **how: self._clone(t, **how))  # noqa: PLW0108
        patch(Tensor, "cpu", lambda t: base.clone(t) if self._has(t) else base.cpu(t))
        patch(Tensor, "to", lambda *args, **how: self._move(*args, **how))  # noqa: PLW0108
        patch(Tensor, "record_stream", lambda t, _: self._recorded.add(id(t)))
        for name in ("tensor", "zeros", "full", "zeros_like"):
            patch(torch, name, partial(self._make, getattr(torch, name)))
        patch(torch, "_foreach_copy_", partial(self._copy, torch._foreach_copy_))
        for module in (state_dict, direct_write):
            patch(module, "view_bytes", partial(self._view, state_dict.view_bytes))
        patch(torch.cuda, "is_initialized", lambda: True)
        patch(torch.cuda, "is_available", lambda: True)  # else a GradScaler does nothing
        patch(torch.cuda, "current_device", lambda: 0)
        patch(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="fake"))
        patch(
            torch.cuda, "current_stream", lambda _=None: getattr(self._side, "stream", self.training_stream)
        )
        stream = SimpleNamespace(is_capturing=lambda: self.is_capturing)
        patch(torch.accelerator, "current_stream", lambda: stream)  # optimizers of torch 2.15 ask
        patch(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        patch(torch.cuda, "Stream", partial(FakeStream, self))
        patch(torch.cuda, "Event", partial(FakeEvent, self))
        patch(torch.cuda, "device", lambda _: contextlib.nullcontext())
        patch(torch.cuda, "stream", self._use_stream)
        patch(torch.cuda, "default_generators", self._generators)
        no_error = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
        patch(torch.cuda, "cudart", lambda: no_error)

    @contextlib.contextmanager
    def _use_stream(self, stream: FakeStream) -> Iterator[None]:
        self._side.stream = stream
        yield
        del self._side.stream

    def _move(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = [torch.device(a) for a in (*args, kwargs.get("device")) if isinstance(a, (str, torch.device))]
        kwargs["device"] = "cpu"
        rest = [a for a in args if not isinstance(a, (str, torch.device))]
        moved = torch._C.TensorBase.to(tensor, *rest, **kwargs)
        return self.put(moved) if place and place[0].type == "cuda" else moved

    def _make(self, make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        device = torch.device(kwargs.pop("device", None) or "cpu")
        like = make.__name__ == "zeros_like" and self._has(args[0])
        made = make(*args, **kwargs)
        return self._keep(made) if device.type == "cuda" or like else made

    def _copy(
        self, copy: Callable[..., None], into: list[Tensor], tensors: list[Tensor], **kwargs: Any
    ) -> None:
        """Copy now; from the GPU in another stream later."""
        stream: Any = torch.cuda.current_stream()
        if stream is self.training_stream:
            assert not any(map(self._has, tensors)), "the host would wait for the GPU"
            copy(into, tensors)
            return
        assert kwargs["non_blocking"]
        assert stream.newest_wait is self.newest_start, "the copy may run before the step it is a copy of"

        @torch.no_grad()
        def run() -> None:
            assert self._recorded >= set(map(id, tensors)), "the allocator may reuse a tensor"
            copy(into, tensors)

        stream.work.append(run)

    def _view(self, view: Callable[[Tensor], memoryview], tensor: Tensor) -> memoryview:
        assert not self._has(tensor), "the host cannot read the memory of a GPU"
        return view(tensor)
