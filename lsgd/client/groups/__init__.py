"""A generation's groups, over lsgd's own TCP connections, Gloo or NCCL."""
