"""What `recovery.py` starts, and how it reads what came of it."""
