"""Errors as clients of OpenAI's API understand them: those of the API and of the workers' own
chat servers.
"""


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, object]:
    """What an answer with that HTTP status holds, or the last event of a stream. `param`: the
    field that is wrong.
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
