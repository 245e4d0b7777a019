"""The default of a client that sends no stat_test (protocol.md, section 8.3)."""

# Largest margin of an honest step.
MARGIN = 0.025
