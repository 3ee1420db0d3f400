"""Programs in the shape of those that people run, alone, with two workers, and through ``lsgd check``."""
