"""How machines find each other, prove by a short code that they belong together, and agree on a run: ``lsgd up``."""
