"""Inspect a machine, a run's directories or a running job."""
