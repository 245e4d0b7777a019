"""How many files and connections a process may have open."""

import resource


def raise_file_limit() -> int:
    """Lets this process open as many files as it may, and returns that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 2**31
