"""What the servers cost."""
