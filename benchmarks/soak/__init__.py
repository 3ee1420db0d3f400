"""A long training in which everything goes wrong."""
