"""What a worker saves of itself, and goes on from."""
