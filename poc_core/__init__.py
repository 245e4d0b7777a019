"""Code that API, workers and commands share. It must import no torch, for the API's sake."""
