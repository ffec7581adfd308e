"""What Slurm, Kubernetes and clouds tell a node, and what is asked of them."""
