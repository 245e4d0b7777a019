"""The defaults of a client that sends no stat_test (protocol.md, section 2, Validation)."""

# Largest L2 distance at which two vectors still agree.
DIST_THRESHOLD = 0.02
# How likely an honest artifact lies further away.
P_MISMATCH = 0.001
# The p_value below which artifacts are a fraud.
FRAUD_THRESHOLD = 0.01
