"""What a worker saves of itself, and continues from."""
