"""What a newcomer costs the others on a slow link: at the start, after a restart, and with an empty disk."""
