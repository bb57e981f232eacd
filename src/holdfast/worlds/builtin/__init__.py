"""Built-in worlds, on tensors."""
