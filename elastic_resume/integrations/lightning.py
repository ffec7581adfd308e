"""Continue Lightning's Trainer after failures: ``Trainer(strategy=ElasticDDPStrategy())``."""

from __future__ import annotations

from elastic_resume.integrations import require_versions

VERSIONS = ("2.6", "2.7")  # from the first to below the second
require_versions("lightning", *VERSIONS)

from elastic_resume.integrations import lightning_strategy  # noqa: E402  after the check of its version

ElasticDDPStrategy = lightning_strategy.make_strategy(
    "lightning", "lightning.pytorch", "lightning.fabric", VERSIONS
)
lightning_strategy.register(ElasticDDPStrategy)
