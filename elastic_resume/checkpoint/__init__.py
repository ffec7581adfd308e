"""One node's checkpoints on disk: format, atomic commit, verification, retention."""
