"""Pure decision functions: resume, restart, drain, hangs, failures, divergence and intervals."""
