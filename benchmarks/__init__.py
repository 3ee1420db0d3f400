"""Measurements: the network laboratory, and what is measured in it."""
