"""Pure decision functions: resume, restart, requeue, hangs, failures, divergence and intervals."""
