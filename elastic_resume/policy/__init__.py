"""Decisions: pure functions of frozen values. No clock, no file, no socket, no torch."""
