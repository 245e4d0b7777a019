"""A scheme that proves nothing, in one folder. Its values are lists, a number a step, as the
decode scheme has.
"""
