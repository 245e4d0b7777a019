"""The console at /console: what its pages see of the node, and the page itself."""
