"""Measurements and evaluations outside a node: the commands calibrate, compute, report, chat-check
and bench.
"""
