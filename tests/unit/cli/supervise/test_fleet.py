"""The workers of one machine: what is shown of the log of one that ended."""

from cli.supervise import fleet
from cli.supervise.fleet import telling_lines


def test_a_cause_far_above_the_end_of_a_log_is_shown_with_it() -> None:
    cause = "worker pid=7: ValueError: no memory left"
    log = ["started", cause, *[f"line {i}" for i in range(100)], "RuntimeError: see above"]
    assert telling_lines(log) == [cause, "...", *log[-fleet.ERROR_TAIL_LINES :]]
    assert telling_lines(log[-5:]) == log[-5:]
