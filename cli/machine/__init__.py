"""What this machine has: GPUs, memory, cores."""
