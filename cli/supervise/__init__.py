"""The commands `up`, `workers` and `demo`, which start, supervise, restart and stop processes of
this machine.
"""
