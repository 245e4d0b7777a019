"""What a request meets before any route: connections, strangers' pages, keys, sizes."""
