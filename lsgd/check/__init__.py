"""``lsgd check``: runs a script as a few workers, records what they do, and judges it by what a run needs."""
