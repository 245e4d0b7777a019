"""Imported before vLLM, whose imports would take a quarter longer with the collector."""

import gc

gc.disable()
