"""Prove a resume: compute the newest snapshot again from an earlier one, and compare."""
