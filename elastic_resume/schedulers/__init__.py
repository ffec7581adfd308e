"""Read settings, limits and preemption notices from Slurm, Kubernetes and clouds."""
