"""All that lsgd does on a GPU, in one command."""
