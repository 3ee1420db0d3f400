"""A worker's iteration: its grant, its round, its gradients."""
