"""The commands that look at this machine and its settings: `doctor` and `config`; a module for
each thing looked at.
"""
