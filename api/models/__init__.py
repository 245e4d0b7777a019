"""Models on this machine's disk, and the deployment of one."""
