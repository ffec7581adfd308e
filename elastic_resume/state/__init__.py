"""Convert tracked objects to named tensors and back; read and compare checkpoints."""
