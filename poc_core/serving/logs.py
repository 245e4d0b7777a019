"""How our processes log: lines on stderr with time and level, as Celery writes them."""

import logging

_OURS = ("api", "cli", "lab", "poc_core", "workers")
# Supervisors read its word for a worker that consumes.
_READ_BY_SUPERVISORS = ("celery",)


class _Format(logging.Formatter):
    """Ours as Celery has them; others' plainer, so that a supervisor can tell them apart."""

    _of_others = logging.Formatter(logging.BASIC_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        is_ours = record.name.partition(".")[0] in _OURS
        return super().format(record) if is_ours else self._of_others.format(record)


def log_to_stderr() -> None:
    """Shows what our modules and Celery say, and warnings of others'. Once, when a process begins.

    The root logger's level counts for others alone: what vLLM's server imports raises it, and the
    levels of its handlers (model-hosting-container-standards, with vLLM 0.25.1).
    """
    handler, of_others = logging.StreamHandler(), logging.StreamHandler()
    for one in (handler, of_others):
        one.setFormatter(_Format("[%(asctime)s: %(levelname)s/%(processName)s] %(message)s"))
    logging.basicConfig(handlers=[of_others])
    for name in (*_OURS, *_READ_BY_SUPERVISORS):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False
