"""From live objects to named tensors and back."""
