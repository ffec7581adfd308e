"""What the scheduler knows about this node."""
