"""`proofline bench`: how fast an engine computes proofs."""
