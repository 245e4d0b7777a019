"""How our processes log: lines on stderr with time and level, as Celery writes them."""

import logging

_OURS = ("api", "cli", "poc_core", "workers")


class _Format(logging.Formatter):
    """Ours as Celery has them; others' plainer, so that a supervisor can tell them apart."""

    _of_others = logging.Formatter(logging.BASIC_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        is_ours = record.name.partition(".")[0] in _OURS
        return super().format(record) if is_ours else self._of_others.format(record)


def log_to_stderr() -> None:
    """Shows what our modules say, and warnings of others'. Once, when a process begins."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Format("[%(asctime)s: %(levelname)s/%(processName)s] %(message)s"))
    logging.basicConfig(handlers=[handler])
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
