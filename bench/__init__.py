"""Benchmarks with targets; docs/benchmarks.md tells what each measures. Linux only."""
