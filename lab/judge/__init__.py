"""Commands that compute proofs in their own process and judge them."""
