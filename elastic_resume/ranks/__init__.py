"""Connect the ranks of a job, and hold the context of each rank."""
