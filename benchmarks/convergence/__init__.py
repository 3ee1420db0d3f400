"""Steps and time to a target."""
