"""A stand-in for NVIDIA's pynvml: what its functions return is in the JSON file of FAKE_NVML.

`tests.support.gpus.FakeGpus` writes the file. It is read again for each call, so a GPU may fail at any time.
A process is of the node of ELASTIC_RESUME_NODE_NAME.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
nvmlEventTypeXidCriticalError = 8  # noqa: N816
POLL_S = 0.02


class NVMLError(Exception):
    """An error code of NVML."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801, N818
    """The driver lacks the function."""


def _read_node() -> dict[str, Any]:
    nodes = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    found: dict[str, Any] = nodes.get(os.environ.get("ELASTIC_RESUME_NODE_NAME")) or nodes["*"]
    return found


def _make_function(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that hangs, is missing or fails if the file says so.

    ``answer`` gets the node, and the GPU if the first argument is one, before the arguments.
    """

    def call(*args: Any) -> Any:
        while name in _read_node()["hanging"]:
            time.sleep(POLL_S)
        node = _read_node()
        if name in node["missing"]:
            raise NVMLError_FunctionNotFound(NVML_ERROR_FUNCTION_NOT_FOUND)
        if name in node["errors"]:
            raise NVMLError(node["errors"][name])
        first = args[0] if args else None
        index = getattr(first, "index", None) if isinstance(first, SimpleNamespace) else first
        if not isinstance(index, int):
            return answer(node, *args)
        gpu = node["gpus"][index]
        if gpu["lost"] or name in gpu["errors"]:
            raise NVMLError(gpu["errors"].get(name, NVML_ERROR_GPU_IS_LOST))
        return answer(gpu, *args)

    return call


def _find_by_uuid(node: dict[str, Any], uuid: str) -> Any:
    for index, gpu in enumerate(node["gpus"]):
        if uuid == gpu["uuid"] or uuid in gpu["instances"]:
            return SimpleNamespace(index=index)
    raise NVMLError(NVML_ERROR_NOT_FOUND)


def _get_field_values(gpu: dict[str, Any], _: Any, fields: list[int]) -> list[Any]:
    if fields != [NVML_FI_DEV_GET_GPU_RECOVERY_ACTION] or gpu["recovery_action"] is None:  # before r570
        return [SimpleNamespace(nvmlReturn=NVML_ERROR_NOT_SUPPORTED, value=None) for _ in fields]
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=gpu["recovery_action"]))]


def _register_events(_: dict[str, Any], handle: Any, types: int, events: Any) -> None:
    if types != nvmlEventTypeXidCriticalError:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    events.watched.add(handle.index)
    with open(os.environ["FAKE_NVML"] + ".watched", "a") as file:
        file.write(f"{os.environ.get('ELASTIC_RESUME_NODE_NAME', '')} {handle.index}\n")


def _wait_for_event(node: dict[str, Any], events: Any, timeout_ms: int) -> Any:
    end = time.monotonic() + timeout_ms / 1000
    while True:
        for index, xid in node["xids"][events.delivered :]:
            events.delivered += 1
            if index in events.watched:
                return SimpleNamespace(device=SimpleNamespace(index=index), eventData=xid)
        if time.monotonic() >= end:
            raise NVMLError(NVML_ERROR_TIMEOUT)
        time.sleep(POLL_S)
        node = _read_node()
        if "nvmlEventSetWait_v2" in node["errors"]:
            raise NVMLError(node["errors"]["nvmlEventSetWait_v2"])


_ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda _: None,
    "nvmlDeviceGetCount": lambda node: len(node["gpus"]),
    "nvmlDeviceGetHandleByIndex": lambda _, index: SimpleNamespace(index=index),
    "nvmlDeviceGetHandleByUUID": _find_by_uuid,
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda _, handle: handle,
    "nvmlDeviceGetUUID": lambda gpu, _: gpu["uuid"],
    "nvmlDeviceGetName": lambda gpu, _: gpu["name"],
    "nvmlDeviceGetFieldValues": _get_field_values,
    "nvmlDeviceGetClockInfo": lambda gpu, _, kind: gpu["clocks"][kind],
    "nvmlDeviceGetMaxClockInfo": lambda gpu, _, kind: gpu["max_clocks"][kind],
    "nvmlDeviceGetTemperature": lambda gpu, _, sensor: gpu["temperatures"][sensor],
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu, _: gpu["clock_reasons"],
    "nvmlEventSetCreate": lambda node: SimpleNamespace(delivered=len(node["xids"]), watched=set()),
    "nvmlDeviceRegisterEvents": _register_events,
    "nvmlEventSetWait_v2": _wait_for_event,
}
globals().update({name: _make_function(name, answer) for name, answer in _ANSWERS.items()})
