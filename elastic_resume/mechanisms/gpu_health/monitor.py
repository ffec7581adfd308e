"""Watch the NVIDIA GPUs of this agent's workers, and remember their faults.

A fault is an Xid (an error that the driver reports) for which no program is to blame, or a recovery action
that the driver asks for. Workers on such a GPU fail again and again, so this node starts none.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict

from elastic_resume import gpus
from elastic_resume.background import BackgroundThread
from elastic_resume.gpus import Gpu
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart
from elastic_resume.policy import failure_classification
from elastic_resume.policy.failure_classification import Failure
from elastic_resume.policy.gpu_faults import GpuFault
from elastic_resume.policy.wording import describe
from elastic_resume.rendezvous.client import RendezvousClient

logger = logging.getLogger(__name__)
EVENT_WAIT_S = 1.0
START_WAIT_S = 0.2  # of a start of workers for the first answer of NVML
RETRY_S = 30.0


class GpuMonitor(AgentPart):
    """Watches from `start` to `close`; nothing is found without NVML."""

    def __init__(self, context: AgentContext) -> None:
        self._emit = context.emit
        self._local_world_size = context.local_world_size
        self._reported: list[GpuFault] = []
        self._first_listing: list[tuple[int | None, Gpu]] = []
        self._is_listed = threading.Event()
        self._thread = BackgroundThread("gpu-monitor", self._watch)
        self._client: RendezvousClient | None = None

    def start(self, client: RendezvousClient) -> None:
        """Begin to watch."""
        self._client = client
        self._thread.start()

    def close(self) -> None:
        """Watch no more; the thread may be in a call of the driver, which is not awaited."""
        self._thread.request_close()

    def find_faults(self) -> tuple[Failure, ...]:
        """Return Xids since the start, and GPUs that need a recovery now; none while NVML starts slowly."""
        if self._client is None or not self._is_listed.wait(START_WAIT_S):
            return ()
        with_xid = [fault for fault in self._reported if fault.xid not in {None, gpus.ACTION_CHANGED_XID}]
        known = {fault.index for fault in with_xid}
        faults = [*with_xid, *(fault for fault in self._list_broken() if fault.index not in known)]
        return tuple(Failure(failure_classification.GPU, self._client.node, None, fault) for fault in faults)

    def _list_gpus(self, limit_s: float = gpus.CALL_LIMIT_S) -> list[tuple[int | None, Gpu]]:
        """List the GPUs of the workers, each with its local rank unless workers share GPUs."""
        found = (gpus.list_gpus(limit_s=limit_s) or ())[: self._local_world_size]
        is_shared = len(found) < self._local_world_size
        return [(None if is_shared else rank, gpu) for rank, gpu in enumerate(found)]

    def _list_broken(self) -> list[GpuFault]:
        """Return the faults of GPUs that need a recovery now."""
        return [_make_fault(rank, gpu) for rank, gpu in self._list_gpus() if gpu.recovery_action]

    def _watch(self) -> float | None:
        """Watch until NVML fails; return the seconds until the next attempt, or None without NVML."""
        if not gpus.is_installed():
            self._is_listed.set()
            return None
        self._first_listing = self._list_gpus(gpus.START_LIMIT_S)
        num_gpus, is_first = len(self._first_listing), not self._is_listed.is_set()
        if is_first and 0 < num_gpus < self._local_world_size:
            logger.warning(
                "this node has %d workers and %d GPUs: a worker without a GPU of its own fails, unless "
                "the script shares them. Check --nproc-per-node and CUDA_VISIBLE_DEVICES.",
                self._local_world_size,
                num_gpus,
            )
        self._is_listed.set()  # after the line: whoever has waited for the list finds it
        self._report(self._list_broken())
        for xid_event in gpus.watch_xids([gpu for _, gpu in self._first_listing], EVENT_WAIT_S):
            if self._thread.is_closing:
                return None
            if xid_event is not None:
                self._report(self._find_xid_faults(*xid_event))
        self._report(self._list_broken())  # NVML fails when a GPU is lost
        return RETRY_S

    def _find_xid_faults(self, uuid: str, xid: int) -> list[GpuFault]:
        if xid in gpus.APPLICATION_XIDS | gpus.HARMLESS_XIDS:
            return []
        if xid != gpus.ACTION_CHANGED_XID and any((f.uuid, f.xid) == (uuid, xid) for f in self._reported):
            return []  # the driver may repeat an Xid many times
        hit = [
            _make_fault(rank, gpu, xid)
            for rank, gpu in self._list_gpus() or self._first_listing
            if (gpu.uuid == uuid if uuid else gpu.recovery_action)
        ]
        if xid == gpus.ACTION_CHANGED_XID:
            return [fault for fault in hit if fault.recovery_action]  # else the GPU has recovered
        return hit or [GpuFault(xid=xid)]  # it is unknown which one has failed

    def _report(self, faults: list[GpuFault]) -> None:
        """Log and emit the faults that are new."""
        for fault in faults:
            if fault not in self._reported:
                self._reported.append(fault)
                logger.warning("%s; this node starts no more workers.", describe(fault))
                self._emit("gpu-fault", **asdict(fault))


def _make_fault(local_rank: int | None, gpu: Gpu, xid: int | None = None) -> GpuFault:
    return GpuFault(local_rank, gpu.index, gpu.uuid, xid, gpu.recovery_action)
