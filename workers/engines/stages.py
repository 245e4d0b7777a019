"""The stages of an engine's start, told as log lines to whoever waits for the engine."""

import logging
import re

logger = logging.getLogger(__name__)

# The lines below, as they stand in a log.
BEGINS = re.compile(r"(?:^|\] )start: (.+)$")
SPEED = re.compile(r"(?:^|\] )self-test: ([\d.]+) nonces/s of (\d+) tokens$")


def begin(stage: str) -> None:
    """Tells that the stage of this name begins now; it ends with the next one, or ready."""
    logger.info("start: %s", stage)


def tell_speed(nonces_per_s: float, seq_len: int) -> None:
    """Tells how fast the self-test saw the engine compute."""
    logger.info("self-test: %.1f nonces/s of %d tokens", nonces_per_s, seq_len)
