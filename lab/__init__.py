"""Measurements and judgements outside the node: calibrate, compute, report, chat-check, bench."""
