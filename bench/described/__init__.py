"""Requests made from the API's own description by schemathesis: every answer must be described
there (`make fuzz`).
"""
