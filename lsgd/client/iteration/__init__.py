"""An iteration of a worker: its turn, its round, its gradients."""
