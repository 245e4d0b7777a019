"""Fair shares, by client, of shared resources: an event loop, a grammar compiler."""
