"""Step efficiency under faults."""
