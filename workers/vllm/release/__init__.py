"""Everything that depends on vLLM's release (0.25.1 to 0.33), with one module per topic."""
