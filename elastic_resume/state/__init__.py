"""Convert tracked objects to named tensors and back; compare and export checkpoints."""
