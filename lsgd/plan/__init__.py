"""The plan of a run and its settings. No torch."""
