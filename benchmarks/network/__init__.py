"""Step times on slow networks."""
