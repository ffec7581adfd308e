"""The agent: one process per node that runs torchelastic and restarts workers after failures."""
