"""Models on this machine's disk, and the deployment of a model."""
