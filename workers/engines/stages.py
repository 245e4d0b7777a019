"""The stages of an engine's start, reported as log lines to processes that wait for the engine."""

import logging
import re

logger = logging.getLogger(__name__)

# Patterns for the log lines of the functions below.
BEGINS = re.compile(r"(?:^|\] )start: (.+)$")
SPEED = re.compile(r"(?:^|\] )self-test: ([\d.]+) nonces/s of (\d+) tokens$")


def begin(stage: str) -> None:
    """Logs that a stage begins. The stage ends when the next one begins or the engine is ready."""
    logger.info("start: %s", stage)


def report_speed(nonces_per_s: float, seq_len: int) -> None:
    logger.info("self-test: %.1f nonces/s of %d tokens", nonces_per_s, seq_len)
