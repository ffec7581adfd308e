"""State of every kind that scripts use is restored bit for bit, or refused with advice."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from elastic_resume.capture.state_cache import StateTracker
from elastic_resume.errors import MismatchError, UntrackableError
from elastic_resume.slots import slot_memory
from elastic_resume.state import load_objects, state_dict
from elastic_resume.state.bucket_order import BucketOrder
from elastic_resume.training.untracked import UntrackedOptimizerCheck
from tests.support import launch_ranks
from tests.support.paths import SCRIPTS
from tests.support.state_image import copy_to_image

JOB = SCRIPTS / "kinds.py"

Build = Callable[[Any], Any]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("part", ["0", *(pytest.param(part, marks=pytest.mark.soak) for part in "1234567")])
def test_every_kind_of_model_resumes_bit_for_bit(tmp_path: Path, part: str) -> None:
    """Three ranks, many kinds: weights, optimizer, average and losses on every rank.

    A kind that can stay in its process sees two worlds end, at another moment of a step on each rank.
    Ranks and both halves of the run have different seeds, so equal values were synchronised or loaded.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_PORT": str(store.port),
    }
    ranks = launch_ranks.run_ranks(3, JOB, str(tmp_path), part, env=[env] * 3)
    results = launch_ranks.read_results(ranks)
    launch_ranks.check_kinds(results, 3 if part == "7" else 4)
    for kind in results[0]:
        assert [ranks[kind]["worlds"] for ranks in results] in ([0] * 3, [2] * 3), f"{kind}: worlds ended"
        assert len({ranks[kind]["common"] for ranks in results}) == 1, f"{kind}: ranks differ"


# ---- optimizers and schedulers -----------------------------------------------------------------------


def decay(epoch: float) -> float:
    """Return a decaying factor."""
    return float(0.9**epoch)


class Remembering:
    """A callable object with state: LambdaLR keeps its attributes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: float) -> float:
        """Return a factor that depends on the number of calls."""
        self.calls += 1
        return decay(epoch) * (1 + 0.01 * self.calls)


SCHEDULERS: dict[str, Build] = {
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=12),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.CosineAnnealingLR(o, 4)], [2]
    ),
    "function": lambda o: schedulers.LambdaLR(o, decay),
    "object": lambda o: schedulers.LambdaLR(o, Remembering()),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, Remembering()),
    "warm restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "averaging": lambda o: SWALR(o, 0.05, anneal_epochs=4),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, scale_fn=Remembering(), cycle_momentum=False),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 8),
    "steps": lambda o: schedulers.MultiStepLR(o, [2, 4]),
}


def plain(kind: Any) -> Build:
    """Return a function that builds an optimizer with default settings."""
    return lambda parameters: kind(parameters, lr=0.05)


PLAIN = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop"),
    "Adafactor",
)
OPTIMIZERS: dict[str, Build] = {
    **{name: plain(getattr(torch.optim, name)) for name in PLAIN},
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "amsgrad, fused": lambda parameters: torch.optim.Adam(parameters, lr=0.05, amsgrad=True, fused=True),
    "rate in a tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.05)),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.05, max_iter=3, line_search_fn="strong_wolfe"),
}
PAIRS = [
    *((name, "steps") for name in OPTIMIZERS),
    *((rate, name) for rate in ("momentum", "rate in a tensor") for name in SCHEDULERS),
]


class Script:
    """A small model with its optimizer and scheduler."""

    def __init__(self, optimizer: Build, scheduler: Build, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = scheduler(self.optimizer)
        self.tracked = state_dict.collect_objects(
            {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        )

    def train(self, step: int) -> None:
        """Take one step; its inputs depend on ``step`` only."""
        torch.manual_seed(100 + step)
        inputs = torch.randn(5, 4)

        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.model(inputs).square().sum()
            loss.backward()
            return loss

        self.optimizer.step(evaluate)
        on_plateau = isinstance(self.scheduler, schedulers.ReduceLROnPlateau)
        self.scheduler.step(*([1.0] if on_plateau else []))

    def all(self) -> tuple[dict[str, str], Any]:
        """Return digests of all tensors, and the rest."""
        flat = state_dict.flatten(self.tracked)
        return state_dict.digest_leaves(flat.leaves), flat.structure


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS, ids=[" with ".join(pair) for pair in PAIRS])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_optimizer_and_scheduler_are_restored(optimizer: str, scheduler: str) -> None:
    """The restored ones take the same further steps, and StateTracker agrees with flatten."""
    first, second = (Script(OPTIMIZERS[optimizer], SCHEDULERS[scheduler], seed) for seed in (0, 1))
    tracker = StateTracker(first.tracked)
    for step in range(3):
        first.train(step)
        view, flat = tracker.read_state(), state_dict.flatten(first.tracked)
        assert slot_memory.merge_state(view.cached.static_structure, view.dynamic_structure) == flat.structure
        assert {leaf.name for leaf in view.leaves} == {leaf.name for leaf in flat.leaves}
    load_objects.load_into(second.tracked, flat.structure, copy_to_image(flat).tensor)
    assert second.all() == first.all()
    for step in range(3, 7):
        first.train(step)
        second.train(step)
    assert second.all() == first.all()


class Rounded(torch.optim.Optimizer):
    """An optimizer that keeps float32 weights for bfloat16 parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change the float32 weights, and round them."""
        del closure
        for parameter in self.param_groups[0]["params"]:
            exact = self.state[parameter].setdefault("exact", parameter.detach().float())
            exact.sub_(1e-3)
            parameter.data.copy_(exact)


def test_optimizer_state_of_other_dtype_is_not_rounded() -> None:
    """Torch's load_state_dict() casts it to the parameter's dtype."""
    optimizers = [Rounded([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]) for _ in range(2)]
    optimizers[0].step()
    flat = state_dict.flatten({"optimizer": optimizers[0]})
    load_objects.load_into({"optimizer": optimizers[1]}, flat.structure, copy_to_image(flat).tensor)
    (restored,) = optimizers[1].state.values()
    assert restored["exact"].dtype == torch.float32
    assert restored["exact"].tolist() == [pytest.approx(0.999, abs=1e-7)] * 3


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")
def test_optimizers_with_sharded_or_local_state_are_refused() -> None:
    """ZeroRedundancyOptimizer and PostLocalSGDOptimizer."""
    optim = importlib.import_module("torch.distributed.optim")  # which warns
    parameters = list(nn.Linear(2, 2).parameters())
    sharded = optim.ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=0.1)
    local = optim.PostLocalSGDOptimizer(torch.optim.SGD(parameters, lr=0.1), PeriodicModelAverager(period=4))
    for optimizer, why in ((sharded, "another part of the state on each rank"), (local, "weights differ")):
        with pytest.raises(UntrackableError, match=f"optimizer: .*{why}.*Use the optimizer inside"):
            state_dict.collect_objects({"optimizer": optimizer})


@pytest.mark.usefixtures("alone")
def test_bucket_order_is_replayed_to_ddp_with_device_ids() -> None:
    """With device_ids, as on GPUs, DDP fails if it is called without any input."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.device_ids, wrapped.device_type = [0], "cpu"
    order = BucketOrder()
    names = [name for name, _ in model.named_parameters()]
    order.load_state_dict({"orders": {"model": names}, "single": ["model"], "steps": 2})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    order.prepare("model", model, wrapped)
    wrapped(torch.ones(2, 2))
    assert wrapped._has_rebuilt_buckets, "a backward pass was seen"
    assert wrapped.module is model
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model.state_dict()["0.weight"], before["0.weight"])


# ---- tensors that a script keeps by itself -----------------------------------------------------------


def carry(source: Any, target: Any) -> None:
    """Save ``source`` and load it into ``target``."""
    flat = state_dict.flatten(state_dict.collect_objects({"ema": source}))
    load_objects.load_into(
        state_dict.collect_objects({"ema": target}), flat.structure, copy_to_image(flat).tensor
    )


def test_tracked_tensors_are_loaded_in_place() -> None:
    """A tensor, a list, a dict or several of these; the script's references stay valid."""
    for make in (
        lambda fill: torch.full((2,), fill),
        lambda fill: [torch.full((2,), fill), torch.full((), fill)],
        lambda fill: (torch.full((2,), fill, dtype=torch.bfloat16),),
        lambda fill: {"layer.weight": torch.full((2,), fill), "layer.bias": torch.full((1,), fill)},
        lambda fill: {"shadow": [torch.full((2,), fill)], "updates": torch.full((), fill)},
    ):
        source, target = make(3.0), make(0.0)
        held = list(state_dict.flatten(state_dict.collect_objects({"ema": target})).leaves)
        carry(source, target)
        assert held
        for leaf in held:
            assert (leaf.tensor == 3).all()
            assert leaf.kind == state_dict.SCRIPT_OWNED


def test_tensor_replaced_in_tracked_list_is_stored() -> None:
    """Averages are often new tensors after each step."""
    shadow = [torch.zeros(2)]
    tracked = state_dict.collect_objects({"ema": shadow})
    shadow[0] = torch.ones(2)
    assert [leaf.tensor.tolist() for leaf in state_dict.flatten(tracked).leaves] == [[1.0, 1.0]]


def test_number_among_tracked_tensors_is_refused() -> None:
    """A float cannot be loaded in place."""
    for given, place in (
        ({"shadow": [torch.zeros(1)], "decay": 0.9}, "ema.decay"),
        ([torch.zeros(1), 3], "ema/1"),
    ):
        with pytest.raises(UntrackableError, match=rf"{place}.*(float|int).*0-d tensor"):
            state_dict.flatten(state_dict.collect_objects({"ema": given}))


def test_tracked_tensors_that_do_not_fit_are_listed_and_unchanged() -> None:
    """As for a model."""
    target = {"a": torch.zeros(2), "b": torch.zeros(1)}
    with pytest.raises(MismatchError) as caught:
        carry({"a": torch.ones(3), "c": torch.ones(1)}, target)
    for line in (
        "ema/a: float32[2] in the tracked tensors, float32[3] in the checkpoint",
        "ema/b: float32[1] in the tracked tensors, absent in the checkpoint",
        "ema/c: absent in the tracked tensors, float32[1] in the checkpoint",
    ):
        assert line in str(caught.value)
    assert not target["a"].any()


# ---- modules -----------------------------------------------------------------------------------------


def quantised() -> Tensor:
    """Make a quantised tensor; torch has begun to deprecate them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


@pytest.mark.parametrize(
    ("buffer", "told"),
    [
        (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo; store it dense"),
        (lambda: torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr; store it dense"),
        (quantised, "qint8, which cannot be stored; dequantise"),
        (lambda: torch.empty(2, device="meta"), "meta device"),
        (lambda: torch.zeros(2).expand(3, 2), "expand"),
    ],
    ids=["sparse", "csr", "quantised", "meta", "expanded"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_unstorable_buffer_is_refused_with_path(buffer: Callable[[], Tensor], told: str) -> None:
    """Before the first step, with advice."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("extra", buffer())
    with pytest.raises(UntrackableError, match=rf"model/0\.extra: .*{told}"):
        state_dict.flatten({"model": model})
    model[0].register_buffer("extra", buffer(), persistent=False)
    assert len(state_dict.flatten({"model": model}).leaves) == 2, "a non-persistent buffer is not stored"


def test_lazy_module_is_refused_until_it_has_shapes() -> None:
    """The error has its path and the remedy."""
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(UntrackableError, match=r"model/0\.weight: .*lazy.*one forward pass before resume"):
        state_dict.flatten({"model": model})
    model(torch.zeros(2, 3))
    assert len(state_dict.flatten({"model": model}).leaves) == 7


def test_tied_tensors_of_object_are_restored_tied() -> None:
    """Otherwise a change in place would reach only one of two references."""

    class Both:
        def __init__(self) -> None:
            self.a = self.b = torch.zeros(2)

        def state_dict(self) -> dict[str, Any]:
            return dict(self.__dict__)

        def load_state_dict(self, given: dict[str, Any]) -> None:
            self.__dict__.update(given)

    source, target = Both(), Both()
    target.a, target.b = torch.ones(2), torch.ones(2)
    carry(source, target)
    assert target.a is target.b


# ---- optimizers that are not tracked -----------------------------------------------------------------


class Wrapping(torch.optim.Optimizer):
    """An optimizer that steps an inner one, and includes its state or not."""

    def __init__(self, inner: torch.optim.Optimizer, *, tells: bool) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner, self.tells = inner, tells

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the inner optimizer."""
        self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, or an empty one."""
        return self.inner.state_dict() if self.tells else super().state_dict()


def test_untracked_optimizer_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    """Built after resume(), or hidden in one without its state; no warning without state."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = {
        "silent": Wrapping(torch.optim.Adam(model.parameters()), tells=False),
        "telling": Wrapping(torch.optim.Adam(model.parameters()), tells=True),
        "own": torch.optim.Adam(model.parameters()),
    }
    tracked = state_dict.collect_objects({"model": model, "optimizer": optimizers})
    watch = UntrackedOptimizerCheck(tracked)
    late = torch.optim.RMSprop(model.parameters())
    innocent = [torch.optim.SGD(model.parameters()), torch.optim.Adam(other.parameters())]
    for part in (model, other):
        part(torch.ones(1, 2)).sum().backward()
    warnings_by_name = {}
    others = {"late": late, "no state": innocent[0], "no part": innocent[1]}
    for name, optimizer in {**optimizers, **others}.items():
        caplog.clear()
        for _ in range(2):
            optimizer.step()
        warnings_by_name[name] = caplog.text.count("WARNING: ")
    assert warnings_by_name == {"silent": 1, "telling": 0, "own": 0, "late": 1, "no state": 0, "no part": 0}
    watch.close()
    caplog.clear()
    torch.optim.Adagrad(model.parameters()).step()
    assert not caplog.messages
