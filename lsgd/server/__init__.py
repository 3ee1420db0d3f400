"""The servers: the coordinator, and the global and local daemons around it."""
