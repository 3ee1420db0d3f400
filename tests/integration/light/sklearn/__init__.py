"""Stands in for scikit-learn, of which the examples take only the digits."""
