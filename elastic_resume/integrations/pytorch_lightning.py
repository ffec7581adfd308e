"""The same as `elastic_resume.integrations.lightning`, for scripts that import ``pytorch_lightning``.

``import lightning.pytorch`` and ``import pytorch_lightning`` are two libraries with classes of their own, and
a Trainer takes a strategy of its own library only.
"""

from __future__ import annotations

from elastic_resume.integrations import LIGHTNING_VERSIONS, require_versions

require_versions("pytorch-lightning", *LIGHTNING_VERSIONS)

import pytorch_lightning  # noqa: E402  after the check of its version
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment  # noqa: E402
from pytorch_lightning.strategies import DDPStrategy  # noqa: E402

from elastic_resume.integrations import lightning_strategy  # noqa: E402

lightning_strategy.check_signatures("pytorch-lightning", pytorch_lightning)


class WorldOfLauncher(TorchElasticEnvironment):
    """Takes ranks and sizes from the launcher, not from Trainer's ``num_nodes`` and ``devices``."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any number: nodes may come and go, and may differ in their number of workers."""


class ElasticDDPStrategy(lightning_strategy.ElasticStrategy, DDPStrategy):
    """Continue DDP training after failures.

    It takes the arguments of DDPStrategy, and ``resume_options``, a dict of arguments of `er.resume`.
    ``run`` is the `Run`, from ``on_fit_start`` on.
    """

    _library = pytorch_lightning
    _environment_class = WorldOfLauncher
