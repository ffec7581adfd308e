"""One node's memory that outlives its workers: slots, the process that owns them, commits from them."""
