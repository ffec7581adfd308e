"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# Others run beside: how long an example takes tells nothing.
settings.register_profile("patient", parent=settings.default, deadline=None)
settings.load_profile("patient")
