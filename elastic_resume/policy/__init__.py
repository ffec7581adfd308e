"""Decide by pure functions: resume, restart, drain, hangs, failures, divergence and intervals."""
