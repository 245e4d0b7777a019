"""`make faults` and `make soak`: a whole stack under work, with and without faults.

Faults are drawn by a seed; work goes on meanwhile. At the end every job that was accepted has
ended, every nonce is there once and right, every payload arrived, and nothing grows.
"""
