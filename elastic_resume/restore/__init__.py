"""The start of a generation: inventory, plan, transfer, load, compare."""
