"""How many files and connections this process may have open."""

import resource

MAX_DESCRIPTORS = 1 << 20
"""More is useless, and some programs that inherit the limit loop over all numbers below it."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one and return it, because 1,024 is too few for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox may forbid it
        return soft
    return wanted
