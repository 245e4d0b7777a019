"""The default threshold for requests without a stat_test (protocol.md, section 8.3)."""

# The largest margin of an honest step.
MARGIN = 0.025
