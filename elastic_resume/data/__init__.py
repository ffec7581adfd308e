"""Assign samples to steps and ranks for any world size, and seed random numbers for each step."""
