"""How our processes log: lines on stderr with time and level, as Celery writes them."""

import logging

_FORMAT = "[%(asctime)s: %(levelname)s/%(processName)s] %(message)s"
_OURS = ("api", "cli", "poc_core", "workers")


def log_to_stderr() -> None:
    """Shows what our modules say, and warnings of others'. Once, when a process begins."""
    logging.basicConfig(format=_FORMAT)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
