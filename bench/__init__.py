"""Benchmarks with targets (docs/benchmarks.md) and campaigns: faults, model families, random
requests. Linux only.
"""
