"""What runs once per node, around torch.distributed.elastic."""
