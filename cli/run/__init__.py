"""The commands that run Proofline or a part of it."""
