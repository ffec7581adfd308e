"""Keep snapshots in shared memory that survives worker crashes, and commit them from there to disk."""
