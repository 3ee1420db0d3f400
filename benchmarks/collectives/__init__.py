"""lsgd's collectives beside Gloo's."""
