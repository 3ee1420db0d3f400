"""Groups of workers and what they do together, on tensors."""
