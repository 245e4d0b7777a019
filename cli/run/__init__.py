"""The commands that run Proofline, or one of its processes."""
