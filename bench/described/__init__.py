"""Requests that schemathesis generates from the API's document, which must describe every answer."""
