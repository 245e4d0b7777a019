"""One module per group of endpoints, each with a `router`, and the services that routers use."""
