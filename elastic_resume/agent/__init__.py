"""Supervises one node: torchelastic, restarts, hangs, shutdown."""
