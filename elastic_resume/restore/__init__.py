"""Restore the job's state when a generation starts: inventory, plan, transfer, load, compare."""
