"""The commands that run a part of Proofline, or all of it."""
