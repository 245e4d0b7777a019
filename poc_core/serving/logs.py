"""The log format of our processes: lines on stderr with time and level, in Celery's format."""

import logging

_OURS = ("api", "cli", "lab", "poc_core", "workers")
# Supervisors read Celery's message that a worker is ready.
_READ_BY_SUPERVISORS = ("celery",)


class _Format(logging.Formatter):
    """Celery's log format for records of our modules. Other records get a format without time."""

    _of_others = logging.Formatter(logging.BASIC_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        is_ours = record.name.partition(".")[0] in _OURS
        return super().format(record) if is_ours else self._of_others.format(record)


def log_to_stderr() -> None:
    """Logs to stderr, from INFO on for our modules and Celery, and from WARNING on for other
    modules. Must be called once, at the start of the process. Our loggers do not propagate, because
    a package that vLLM's server imports raises the root logger's level (vLLM 0.25.1).
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
