"""Distance proofs, the earlier scheme (protocol.md, section 3)."""
