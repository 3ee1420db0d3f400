"""Measurements, each a command: ``python -m benchmarks.NAME``; and the testbed that they run on."""
