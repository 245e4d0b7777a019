"""Redis' url, and connections made from it."""
