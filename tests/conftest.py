"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Others run beside: how long an example takes tells nothing.
settings.register_profile("patient", parent=settings.default, deadline=None)
settings.load_profile("patient")

# A node whose processes stand still for seconds, for want of a processor, is not lost. Deaths are seen at
# once all the same, since connections end; of silence --node-timeout says more, which wins over this.
os.environ.setdefault("PET_RDZV_CONF", "node_timeout=10")
