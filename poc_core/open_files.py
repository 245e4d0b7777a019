"""The limit of a process's open files and connections."""

import resource


def raise_file_limit() -> int:
    """Raises this process's limit of open files to the hard limit. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 2**31
