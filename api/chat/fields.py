"""Parses the bodies of OpenAI requests, and adds fields to these bodies."""

from codecs import BOM_UTF8
from hashlib import blake2b
from io import BytesIO
from typing import Any

from pydantic_core import from_json, to_json
from python_multipart import parse_form
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File

# First bytes of compressed files, for bodies without a Content-Encoding.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class UnreadableError(ValueError):
    """A body cannot be parsed. `param` is the name of the wrong field, or None."""

    def __init__(self, why: str, param: str | None = None) -> None:
        super().__init__(why)
        self.param = param


def fields_of(content_type: str, body: bytes) -> dict[str, Any]:
    """Parses a JSON or form body. Returns its fields, without files. Raises UnreadableError."""
    is_form = content_type.startswith("multipart/form-data")
    fields = _of_form(content_type, body) if is_form else _of_json(body)
    if not isinstance(fields, dict):
        raise UnreadableError("The body must be a JSON object.")
    if not isinstance(fields.get("model"), str | None):
        raise UnreadableError("`model` must be a string.", "model")
    return fields


def _of_json(body: bytes) -> Any:
    try:
        return from_json(body or b"{}")
    except ValueError as error:
        why = str(error)
    if body.startswith(BOM_UTF8):
        raise UnreadableError("The body begins with a byte order mark; send JSON without it.")
    for mark, name in _COMPRESSED.items():
        if body.startswith(mark):
            raise UnreadableError(
                f"The body is {name}; say so with the header Content-Encoding: {name}."
            )
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(
            f"The body is not UTF-8: byte 0x{body[error.start]:02x} at position {error.start}."
        ) from None
    if b"\0" in body[:4]:
        raise UnreadableError("The body is UTF-16 or UTF-32; send UTF-8.")
    if "hex escape" in why:
        why += ", which is half of a surrogate pair or lacks digits"
    raise UnreadableError(f"The body is no JSON: {why}.")


def salt_of(client: str, asked: dict[str, Any]) -> str:
    """Returns a `cache_salt` made from the client's name, so that clients share no prefix cache."""
    own = str(asked.get("cache_salt") or "")
    return blake2b(f"{len(client)} {client} {own}".encode(), digest_size=16).hexdigest()


def extended(
    asked: dict[str, Any], body: bytes, more: dict[str, Any]
) -> tuple[dict[str, Any], bytes]:
    """Adds the fields `more` to a JSON request. Returns the request's new fields and body. Leaves a
    form request unchanged.
    """
    text = body.rstrip()
    if not more or not text.endswith(b"}"):  # a form or an empty body: a worker refuses it
        return asked, body
    comma = b"," if asked else b""
    return asked | more, text[:-1] + comma + to_json(more)[1:]


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
        raise UnreadableError(f"The body is no form: {error}.") from None
    return found
