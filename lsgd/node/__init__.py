"""`lsgd launch`: a node's processes, started, shown and ended as one."""
