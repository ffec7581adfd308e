"""Read settings and limits from Slurm, Kubernetes and others."""
