"""OpenAPI for bodies that routes read themselves, so that FastAPI does not know them (see api/bodies.py)."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from poc_core.schemes.requests import BatchBody, JobBody, RoundBody

_REF = "#/components/schemas/{model}"


def json_body(bodies: Mapping[str, type[JobBody] | type[RoundBody] | type[BatchBody]]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads a JSON body as that of one of the schemes."""
    refs = [{"$ref": _REF.format(model=body.__name__)} for body in bodies.values()]
    examples = {name: example for body in bodies.values() for name, example in body.examples.items()}
    content = {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}, "examples": examples}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def json_examples(description: str, examples: dict[str, dict[str, Any]], model: Any) -> dict[str, Any]:
    """An entry of `responses` with several examples."""
    return {"model": model, "description": description, "content": {"application/json": {"examples": examples}}}


def describe(app: FastAPI, bodies: list[type[BaseModel]]) -> None:
    """Makes /openapi.json contain the schemas of `bodies` and of all that they refer to."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=app.openapi_tags,
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for body in bodies:
                schema = body.model_json_schema(ref_template=_REF)
                schemas |= schema.pop("$defs", {}) | {body.__name__: schema}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
