"""Process groups on torch.distributed, built anew for each generation."""
