"""Provide `elastic_resume.integrations.lightning` for scripts that import ``pytorch_lightning``.

``import lightning.pytorch`` and ``import pytorch_lightning`` are two libraries with classes of their own, and
a Trainer takes a strategy of its own library only.
"""

from __future__ import annotations

from elastic_resume.integrations import require_versions

VERSIONS = ("2.6", "2.7")
require_versions("pytorch-lightning", *VERSIONS)

from elastic_resume.integrations import lightning_strategy  # noqa: E402  after the check of its version

ElasticDDPStrategy = lightning_strategy.make_strategy(
    "pytorch-lightning", "pytorch_lightning", "lightning_fabric", VERSIONS
)
lightning_strategy.register(ElasticDDPStrategy)
