"""`proofline bench`: measures how fast an engine computes proofs."""
