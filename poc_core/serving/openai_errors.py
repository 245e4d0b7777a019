"""Errors in the form of OpenAI's API, for the API and the workers' chat servers."""


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, object]:
    """The body of an error of that HTTP status, or a stream's last event. `param`: wrong field."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
