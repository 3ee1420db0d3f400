"""Watching a run: a reader of its stream of events, and the view of the run that follows from them."""
