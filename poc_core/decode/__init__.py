"""The arithmetic of decode proofs (protocol.md, section 8): torch and numpy only, no engine."""
