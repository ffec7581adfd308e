"""Continue Lightning's Trainer after failures: ``Trainer(strategy=ElasticDDPStrategy())``.

`lightning_strategy` has the code, which `pytorch_lightning` shares.
"""

from __future__ import annotations

from elastic_resume.integrations import LIGHTNING_VERSIONS, require_versions

require_versions("lightning", *LIGHTNING_VERSIONS)

import lightning.pytorch  # noqa: E402  after the check of its version
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from elastic_resume.integrations import lightning_strategy  # noqa: E402

lightning_strategy.check_signatures("lightning", lightning.pytorch)


class WorldOfLauncher(TorchElasticEnvironment):
    """Takes ranks and sizes from the launcher, not from Trainer's ``num_nodes`` and ``devices``."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any number: nodes may come and go, and may differ in their number of workers."""


class ElasticDDPStrategy(lightning_strategy.ElasticStrategy, DDPStrategy):
    """Continue DDP training after failures.

    It takes the arguments of DDPStrategy, and ``resume_options``, a dict of arguments of `er.resume`.
    ``run`` is the `Run`, from ``on_fit_start`` on.
    """

    _library = lightning.pytorch
    _environment_class = WorldOfLauncher
