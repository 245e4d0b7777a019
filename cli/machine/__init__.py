"""This machine's GPUs, CPU cores, memory and sensors."""
