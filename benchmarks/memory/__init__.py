"""What a worker's memory holds beside the model."""
