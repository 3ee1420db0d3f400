"""The command line `lsgd`."""
