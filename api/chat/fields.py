"""The fields of a request to OpenAI's paths, parsed once for all that looks at them."""

from io import BytesIO
from typing import Any

from pydantic_core import from_json
from python_multipart import parse_form
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File


def fields_of(content_type: str, body: bytes) -> dict[str, Any]:
    """The fields of a JSON object, or of a form (audio) without its files; an empty body has none.
    ValueError: it is neither, or its `model` is no string."""
    fields = _of_form(content_type, body) if is_form(content_type) else from_json(body or b"{}")
    if not isinstance(fields, dict) or not isinstance(fields.get("model"), str | None):
        raise ValueError("no JSON object whose model is a string")
    return fields


def is_form(content_type: str) -> bool:
    return content_type.startswith("multipart/form-data")


def _of_form(content_type: str, body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def on_field(field: Field) -> None:
        name = (field.field_name or b"").decode(errors="replace")
        found[name] = (field.value or b"").decode(errors="replace")

    def on_file(file: File) -> None:
        file.close()

    headers = {
        "Content-Type": content_type.encode("latin-1"),
        "Content-Length": str(len(body)).encode(),
    }
    try:
        parse_form(headers, BytesIO(body), on_field, on_file)
    except FormParserError as error:
        raise ValueError(str(error)) from None
    return found
