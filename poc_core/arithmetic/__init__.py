"""The arithmetic that all schemes of proofs share."""
