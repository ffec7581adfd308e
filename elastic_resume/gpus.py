"""Read what NVML, NVIDIA's library, says about the GPUs of this node's workers.

It needs the module pynvml of nvidia-ml-py (extra ``nvidia``); without it nothing is known. A broken driver
is the case that matters here: a GPU may be lost during a call, and a call may last minutes. So no function
raises an error of NVML, and each answers within its limit.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

CALL_LIMIT_S = 2.0
START_LIMIT_S = 60.0  # of the first call, which may initialize every GPU of the machine
# A program is to blame for these Xids: NVIDIA's k8s-device-plugin also leaves the GPU in use after them.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
HARMLESS_XIDS = frozenset({63, 92, 94})
"""Memory errors after which the GPU works on: a row is to be remapped, corrected, or one program ends."""
ACTION_CHANGED_XID = 154  # the recovery action has changed, perhaps to none
# Numbers of NVML. Drivers before r570 have no recovery actions, later ones have more.
_RECOVERY_ACTION_FIELD, _XID_EVENT, _SM_CLOCK, _GPU_SENSOR = 230, 8, 1, 0
_RECOVERY_ACTIONS = ("", "GPU reset", "reboot", "drain P2P", "drain and reset")
_NO_PERMISSION, _TIMEOUT, _GPU_IS_LOST, _RESET_REQUIRED = 4, 10, 15, 16
_ACTIONS_OF_ERRORS = {_GPU_IS_LOST: "reboot", _RESET_REQUIRED: "GPU reset"}
# Bits of nvmlClocksEventReasons.
_SLOWDOWNS = {
    0x60: "thermal slowdown",
    0x80: "power brake",
    0x04: "power limit",
    0x02: "clocks set by a user",
}
_abandoned: list[threading.Thread] = []  # calls that have not returned
_identities: dict[int, tuple[str, str]] = {}  # UUID and name by index: a lost GPU has neither


@dataclass(frozen=True)
class Gpu:
    """A GPU; with MIG the whole of it.

    ``recovery_action`` is what the driver asks for before the GPU can be used again, empty for nothing.
    ``uuid`` and ``name`` are empty for a GPU that was lost before this process first saw it.
    """

    index: int
    uuid: str
    name: str
    recovery_action: str = ""


def is_installed() -> bool:
    """Return whether there is a module pynvml."""
    return sys.modules.get("pynvml", ...) is not None and importlib.util.find_spec("pynvml") is not None


def list_gpus(
    environ: Mapping[str, str] = os.environ, limit_s: float = CALL_LIMIT_S
) -> tuple[Gpu, ...] | None:
    """List the GPUs that CUDA shows to the workers of this environment, in the order of its ordinals.

    A worker is supposed to use the ordinal of its local rank. Return None if NVML does not answer, or if that
    order is unknown: CUDA numbers unequal GPUs by speed, NVML by PCI address.
    """
    return _call(lambda nvml: _select_visible(nvml, _list_all(nvml), environ), limit_s)


def describe_load(uuid: str, limit_s: float = CALL_LIMIT_S) -> str:
    """Describe clock, temperature and slowdowns of a GPU; empty if NVML does not answer."""
    return _call(lambda nvml: ", ".join(_list_load(nvml, uuid)), limit_s) or ""


def watch_xids(gpus: Sequence[Gpu], timeout_s: float) -> Iterator[tuple[str, int] | None]:
    """Yield UUID and Xid of each error that the driver reports from now on, and None after each timeout.

    The UUID is empty if the GPU does not answer any more. The iterator ends when NVML fails; it may block for
    as long as the driver does.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        events = nvml.nvmlEventSetCreate()
        for gpu in gpus:
            with contextlib.suppress(nvml.NVMLError):  # a lost GPU reports nothing
                handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
                nvml.nvmlDeviceRegisterEvents(handle, _XID_EVENT, events)
        while gpus:
            yield _wait_for_xid(nvml, events, timeout_s)
    except Exception as error:  # noqa: BLE001 - see the module
        logger.debug("NVML reports no more Xids: %s.", error)


def _wait_for_xid(nvml: Any, events: Any, timeout_s: float) -> tuple[str, int] | None:
    try:
        event = nvml.nvmlEventSetWait_v2(events, round(timeout_s * 1000))
    except nvml.NVMLError as error:
        if error.value == _TIMEOUT:
            return None
        raise
    try:
        return nvml.nvmlDeviceGetUUID(event.device), int(event.eventData)
    except nvml.NVMLError:
        return "", int(event.eventData)


def _call(read: Callable[[Any], T], limit_s: float) -> T | None:
    """Return what ``read`` returns for the module pynvml, or None after an error or the limit."""
    if any(thread.is_alive() for thread in _abandoned):
        return None
    answers: list[T] = []

    def run() -> None:
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()  # later calls only count
            answers.append(read(nvml))
        except Exception as error:  # noqa: BLE001 - see the module
            logger.debug("NVML does not answer: %s.", error)

    thread = threading.Thread(target=run, name="nvml", daemon=True)
    with contextlib.suppress(RuntimeError):  # the process may start no more threads
        thread.start()
        thread.join(limit_s)
    if thread.is_alive():
        _abandoned[:] = [thread]
        logger.warning("NVIDIA's driver has not answered for %g s; GPUs are not checked meanwhile.", limit_s)
    return answers[0] if answers else None


def _list_all(nvml: Any) -> list[Gpu]:
    """List the GPUs of this machine that this process may use, in NVML's order."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        action = ""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            _identities[index] = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            action = _read_recovery_action(nvml, handle)
        except nvml.NVMLError as error:
            if error.value == _NO_PERMISSION:  # another job's, by the control group of devices
                continue
            action = _ACTIONS_OF_ERRORS.get(error.value, "")
        found.append(Gpu(index, *_identities.get(index, ("", "")), action))
    return found


def _read_recovery_action(nvml: Any, handle: Any) -> str:
    """Return the recovery action; empty if the driver is too old to have one."""
    (answer,) = nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION_FIELD])
    if answer.nvmlReturn:
        return _ACTIONS_OF_ERRORS.get(answer.nvmlReturn, "")
    number = int(answer.value.uiVal)
    return _RECOVERY_ACTIONS[number] if number < len(_RECOVERY_ACTIONS) else f"recovery action {number}"


def _select_visible(nvml: Any, gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...] | None:
    """Select as CUDA does: the entries of CUDA_VISIBLE_DEVICES before the first that names no GPU."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    entries = visible.split(",") if visible is not None else map(str, range(len(gpus)))
    by_speed = environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({g.name for g in gpus if g.name}) > 1
    selected: list[Gpu] = []
    for entry in map(str.strip, entries):
        if entry.isdecimal() and by_speed:
            return None
        found = _find_entry(nvml, gpus, entry)
        if len(found) != 1:
            break
        selected += found
    return tuple(selected)


def _find_entry(nvml: Any, gpus: Sequence[Gpu], entry: str) -> list[Gpu]:
    """Return the GPUs that an entry of CUDA_VISIBLE_DEVICES may mean."""
    if entry.isdecimal():
        return list(gpus[int(entry) :][:1])
    if entry.startswith("MIG-"):
        with contextlib.suppress(nvml.NVMLError):
            instance = nvml.nvmlDeviceGetHandleByUUID(entry)
            entry = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance))
    return [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]


def _list_load(nvml: Any, uuid: str) -> list[str]:
    """List what NVML says of a GPU's load; a driver may lack some of it."""
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    found = []
    with contextlib.suppress(nvml.NVMLError):
        clock = nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK)
        found.append(f"{clock:,} of {nvml.nvmlDeviceGetMaxClockInfo(handle, _SM_CLOCK):,} MHz")
    with contextlib.suppress(nvml.NVMLError):
        found.append(f"{nvml.nvmlDeviceGetTemperature(handle, _GPU_SENSOR)} °C")
    with contextlib.suppress(nvml.NVMLError):
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        found += [words for bits, words in _SLOWDOWNS.items() if reasons & bits]
    return found
