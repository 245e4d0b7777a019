"""The checks of a request before any route: connections, foreign pages, keys, sizes."""
