"""Carry what each rank has logged in Lightning's current epoch, so that its means continue after a restart.

``self.log(..., on_epoch=True)`` adds up values on each rank until the epoch ends, and so do torchmetrics'
metrics. Lightning's own checkpoints leave both out. The ranks exchange them at each step boundary. In a world
of another size the sums of old rank i continue on new rank i modulo the number of ranks. Sums and logged
means stay right, up to rounding, once they are synchronised over the ranks.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from elastic_resume.data.batch_size import read_rank_and_world_size
from elastic_resume.data.rank_values import RankState
from elastic_resume.errors import UsageError

logger = logging.getLogger(__name__)

MAX_CARRIED_BYTES = 64 * 1024  # of one rank: all ranks send them at each step
Row = dict[str, Any]

_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    **{f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "min", "max")},
    "sum": sum,
    "min": min,
    "max": max,
}
_SHOWN = ("_callback_metrics", "_logged_metrics")  # attributes of Lightning's logger connector


class CarriedMetrics(RankState):
    """The values that this rank has logged, and the states of the module's torchmetrics."""

    def __init__(self, trainer: Any, library: ModuleType) -> None:
        """Carry those of ``trainer``, an object of ``library``."""
        super().__init__()
        self._trainer = trainer
        self._classes = library.trainer.connectors.logger_connector.result

    def read_own(self) -> Row:
        """Return this rank's row.

        Raises:
            UsageError: a metric keeps a list of samples, or more than fits.

        """
        connector = self._trainer._logger_connector  # noqa: SLF001
        results = self._trainer.fit_loop.epoch_loop._results  # noqa: SLF001
        row = {
            "results": {key: _read_result(result) for key, result in results.items()},
            "shown": {
                part: {
                    name: _pack(value)
                    for name, value in getattr(connector, part).items()
                    if isinstance(value, Tensor)
                }
                for part in _SHOWN
            },
            "metrics": {path: _read_metric(path, metric) for path, metric in self._updated_metrics()},
        }
        size = len(json.dumps(row))
        if size > MAX_CARRIED_BYTES:
            raise UsageError(
                f"Lightning: this rank has {size} bytes of logged values and metrics within an epoch, and at "
                f"most {MAX_CARRIED_BYTES} can be carried over a restart. Compute large metrics in "
                "validation, where they begin and end within a step."
            )
        return row

    def load_rows(self, rows: list[Row]) -> None:
        """Continue with this rank's row, or with its part of the rows of another world."""
        rank, world_size = read_rank_and_world_size()
        row = rows[rank] if len(rows) == world_size else fold_rows(rows, rank, world_size)
        trainer, device = self._trainer, self._trainer.strategy.root_device
        # A process that outlives a change has results of a later step, perhaps of a validation.
        trainer._logger_connector.reset_results()  # noqa: SLF001
        results = trainer.fit_loop.epoch_loop._results  # noqa: SLF001
        results.clear()
        for key, saved in row["results"].items():
            results[key] = self._make_result(saved).to(device)
        for part, values in row["shown"].items():
            shown = getattr(trainer._logger_connector, part)  # noqa: SLF001
            shown.clear()
            shown.update({name: _unpack(value).to(device) for name, value in values.items()})
        for path, metric in _iter_metrics(trainer.lightning_module):
            if path in row["metrics"]:
                _load_metric(metric, row["metrics"][path])
            else:
                metric.reset()

    def _updated_metrics(self) -> Iterator[tuple[str, Metric]]:
        return (
            (path, metric)
            for path, metric in _iter_metrics(self._trainer.lightning_module)
            if metric.update_called
        )

    def _make_result(self, saved: Row) -> Any:
        """Build the object in which Lightning adds up one logged value."""
        meta = self._classes._Metadata(  # noqa: SLF001
            **{**saved["meta"], "reduce_fx": _REDUCTIONS[saved["meta"]["reduce_fx"]]}
        )
        meta.sync = self._classes._Sync(  # noqa: SLF001
            fn=self._trainer.strategy.reduce, _should=saved["sync"], rank_zero_only=saved["rank_zero_only"]
        )
        result = self._classes._ResultMetric(meta, saved["is_tensor"])  # noqa: SLF001
        if saved["is_tensor"]:
            result.value = _unpack(saved["value"])
        else:
            result.value = self._trainer.lightning_module.get_submodule(saved["meta"]["metric_attribute"])
        if saved["weight"] is not None:
            result.cumulated_batch_size = _unpack(saved["weight"])
        if saved["cache"] is not None:
            result._forward_cache = _unpack(saved["cache"])  # noqa: SLF001
        result.has_reset = saved["has_reset"]
        result._update_count = int(not result.has_reset)  # noqa: SLF001
        return result


def _iter_metrics(module: Any) -> Iterator[tuple[str, Metric]]:
    return ((path, part) for path, part in module.named_modules() if isinstance(part, Metric))


def _read_result(result: Any) -> Row:
    meta = result.meta
    reduce_name = next((name for name, function in _REDUCTIONS.items() if function is meta.reduce_fx), None)
    if meta.sync.group is not None or reduce_name is None:
        raise UsageError(
            f"Lightning: self.log({meta.name!r}) has a process group or a reduction of its own, which cannot "
            "be carried over a restart. Log it without sync_dist_group=, or as a torchmetrics metric."
        )
    names = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
    kept = {name: getattr(meta, name) for name in (*names, "dataloader_idx", "metric_attribute")}
    weight = result.cumulated_batch_size if result.is_tensor and meta.is_mean_reduction else None
    return {
        "meta": {**kept, "reduce_fx": reduce_name},
        "sync": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        "value": _pack(result.value) if result.is_tensor else None,
        "weight": weight if weight is None else _pack(weight),
        "cache": _pack(result._forward_cache) if isinstance(result._forward_cache, Tensor) else None,  # noqa: SLF001
    }


def _read_metric(path: str, metric: Metric) -> Row:
    states, reductions = {}, {}
    for name, state in metric.metric_state.items():
        if isinstance(state, list):
            raise UsageError(
                f"Lightning: the metric {path} keeps a list of samples ({name}) in the middle of a training "
                "epoch, which cannot be carried over a restart. Use a form of fixed size (thresholds=), or "
                "compute it in validation."
            )
        states[name] = _pack(state)
        reductions[name] = getattr(metric._reductions[name], "__name__", "").removeprefix("dim_zero_")  # noqa: SLF001
    return {"updates": metric.update_count, "states": states, "reductions": reductions}


def _load_metric(metric: Metric, saved: Row) -> None:
    for name, packed in saved["states"].items():
        setattr(metric, name, _unpack(packed).to(metric.device))
    metric._update_count = saved["updates"]  # noqa: SLF001
    metric._computed = None  # noqa: SLF001


# ---- worlds of another size -------------------------------------------------------------------------------


def fold_rows(rows: list[Row], rank: int, world_size: int) -> Row:
    """Return the row of ``rank`` in a world of another size than that of ``rows``."""
    own = rows[rank::world_size]
    pattern = own[0] if own else rows[0]
    results = {
        key: _fold_result([row["results"][key] for row in own if key in row["results"]], saved)
        for key, saved in pattern["results"].items()
        if own or not saved["rank_zero_only"]
    }
    metrics = {}
    for path, saved in pattern["metrics"].items():
        parts = [row["metrics"][path] for row in own if path in row["metrics"]]
        if parts and (folded := _fold_metric(parts, saved)) is not None:
            metrics[path] = folded
        elif parts:
            logger.warning(
                f"WARNING: Lightning: the metric {path} cannot be divided among another number of ranks; its "
                "value of this epoch starts from zero."
            )
    return {"results": results, "shown": pattern["shown"], "metrics": metrics}


def _fold_result(parts: list[Row], saved: Row) -> Row:
    """Add up what several ranks logged; without one begin at zero, for the same synchronised values."""
    if not saved["is_tensor"] or not saved["meta"]["on_epoch"]:
        return saved
    operation = saved["meta"]["reduce_fx"].removeprefix("torch.")
    operation = "sum" if operation == "mean" else operation
    folded = dict(saved)
    for name in ("value", "weight"):
        if saved[name] is not None:
            numbers = [_unpack(part[name]) for part in parts]
            zero = _unpack(saved[name]) if operation != "sum" else torch.zeros_like(_unpack(saved[name]))
            folded[name] = _pack(_combine(operation, numbers) if numbers else zero)
    return folded


def _fold_metric(parts: list[Row], saved: Row) -> Row | None:
    states = {}
    for name, operation in saved["reductions"].items():
        if operation not in {"sum", "min", "max"}:  # means of groups of different sizes would be wrong
            return None
        states[name] = _pack(_combine(operation, [_unpack(part["states"][name]) for part in parts]))
    return {**saved, "updates": sum(part["updates"] for part in parts), "states": states}


def _combine(operation: str, tensors: list[Tensor]) -> Tensor:
    stacked = torch.stack(tensors)
    if operation == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.amin(0) if operation == "min" else stacked.amax(0)


# ---- tensors as JSON --------------------------------------------------------------------------------------


def _pack(tensor: Tensor) -> list[Any]:
    """Return dtype, shape and bytes, in which each bit survives JSON."""
    here = tensor.detach().cpu().contiguous()
    content = here.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(here.dtype), list(here.shape), base64.b64encode(content).decode()]


def _unpack(packed: list[Any]) -> Tensor:
    dtype, shape, text = packed
    content = bytearray(base64.b64decode(text))
    if not content:
        return torch.zeros(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(content, dtype=_DTYPES[dtype]).reshape(shape).clone()
