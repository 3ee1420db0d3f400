"""Groups of workers, and their collectives on tensors."""
