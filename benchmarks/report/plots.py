"""What all pictures have in common."""

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999999")
"""Told apart by the colour-blind too (Okabe and Ito)."""
