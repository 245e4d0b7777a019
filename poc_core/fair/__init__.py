"""Fair sharing among clients, of an event loop or a grammar compiler."""
