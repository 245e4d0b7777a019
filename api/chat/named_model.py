"""The model that a request to OpenAI's paths names."""

from io import BytesIO

from pydantic import BaseModel
from python_multipart import parse_form
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File


class _Named(BaseModel):
    model: str | None = None


def model_in(content_type: str, body: bytes) -> str | None:
    """`model` of a JSON body or form (audio); None: it names none. ValueError: it is neither."""
    if not content_type.startswith("multipart/form-data"):
        return _Named.model_validate_json(body).model if body else None
    found: list[bytes] = []

    def on_field(field: Field) -> None:
        if field.field_name == b"model":
            found.append(field.value or b"")

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
    return found[0].decode() if found else None
