"""Start no workers on a node of which NVIDIA's driver says that a GPU is broken.

`monitor` asks the driver. Its event is::

    gpu-fault   local_rank (null: unknown), uuid, index (of NVML, or null), xid (null: only an action),
                recovery_action (of the driver, or "")

`policy.failure_classification` reads it: a broken GPU explains why its worker has failed.
"""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism, lazily

GPU_HEALTH = Mechanism(make_agent_part=lazily("gpu_health.monitor", "GpuMonitor"))
