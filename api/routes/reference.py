"""Adds to OpenAPI the request bodies that routes parse themselves (api/bodies.py)."""

import json
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from poc_core.schemes.requests import BatchBody, JobBody, RoundBody

_REF = "#/components/schemas/{model}"
_SENTENCE = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}


def _refusal(description: str, schema: dict[str, Any] = _SENTENCE) -> dict[str, Any]:
    content = {"schema": schema, "example": {"detail": description}}
    return {"description": description, "content": {"application/json": content}}


# Refusals that any operation may return before it begins.
_REFUSALS = {
    "400": _refusal("The request is not valid HTTP."),
    "401": _refusal(
        "A key is missing or wrong: send Authorization: Bearer KEY.", {"type": "object"}
    ),
    "403": _refusal(
        "The key lacks the role, or a foreign web page sent this (POC_ALLOWED_ORIGINS).",
        {"type": "object"},
    ),
    "408": _refusal("The request was not complete within 60 s."),
    "413": _refusal("The body is too large.", {"type": "object"}),
    "415": _refusal("The Content-Type is not application/json."),
    "421": _refusal("The Host header's name is not in POC_ALLOWED_HOSTS."),
    "429": _refusal(
        "Too many requests (POC_MAX_REQUESTS_PER_S). Repeat after Retry-After seconds."
    ),
    "431": _refusal("The headers are too large."),
    "503": _refusal(
        "Too many large bodies are being read. Repeat after Retry-After seconds.",
        {"type": "object"},
    ),
}
_RETRY_AFTER = {
    "Retry-After": {
        "description": "Seconds after which to repeat the request.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
# Description of each tag, in the order of the reference page.
TAGS = [
    {"name": "proof of compute", "description": "Jobs: artifacts of given nonces, validations."},
    {"name": "rounds", "description": "Rounds: start, switch, validate and stop them."},
    {"name": "aggregator", "description": "The network node's paths for rounds, jobs and models."},
    {"name": "node", "description": "The deployed model: state, deploy, stop, versions."},
    {"name": "GPU", "description": "GPUs and their driver."},
    {"name": "chat", "description": "OpenAI's paths, answered by the workers' vLLM."},
    {"name": "hosts", "description": "Hosts that join with a token."},
    {"name": "health", "description": "Probes, the clock, metrics."},
]
_KEY = "A key of `proofline key new`. Not needed on loopback or from POC_TRUSTED_NETWORKS."
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": _KEY},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": _KEY},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key", "description": _KEY},
}


def json_body(
    bodies: Mapping[str, type[JobBody] | type[RoundBody] | type[BatchBody]],
) -> dict[str, Any]:
    """Returns a route's `openapi_extra`. `bodies`: pydantic models of its body, by scheme name."""
    refs = [{"$ref": _REF.format(model=body.__name__)} for body in bodies.values()]
    examples = {
        name: example for body in bodies.values() for name, example in body.examples.items()
    }
    content = {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}, "examples": examples}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def json_examples(
    description: str, examples: dict[str, dict[str, Any]], model: Any
) -> dict[str, Any]:
    """Returns the entry for one status in a route's `responses`, with several JSON examples."""
    return {
        "model": model,
        "description": description,
        "content": {"application/json": {"examples": examples}},
    }


def describe(app: FastAPI, bodies: list[type[BaseModel]], without_key: Collection[str]) -> None:
    """Makes the app serve /openapi.json with `bodies`, errors and API keys.

    `without_key`: the paths that need no API key.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=TAGS,
            )
            # {}: a client without a key, as on loopback
            document["security"] = [*({name: []} for name in _SECURITY), {}]
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for body in bodies:
                schema = body.model_json_schema(ref_template=_REF)
                schemas |= schema.pop("$defs", {}) | {body.__name__: schema}
            document["components"]["securitySchemes"] = _SECURITY
            for name, path in document["paths"].items():
                for operation in path.values():
                    if name in without_key:
                        operation["security"] = []
                    operation["responses"] = _with_retry_after(_REFUSALS | operation["responses"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    _serve_as_bytes(app)


def _with_retry_after(responses: dict[str, Any]) -> dict[str, Any]:
    return {
        status: answer | {"headers": _RETRY_AFTER} if status in ("429", "503") else answer
        for status, answer in responses.items()
    }


def _serve_as_bytes(app: FastAPI) -> None:
    """Replaces FastAPI's route for /openapi.json by a route that serializes the document once."""
    assert app.openapi_url is not None
    content = cache(lambda: json.dumps(app.openapi(), separators=(",", ":")).encode())

    async def document(_: Request) -> Response:
        return Response(content(), media_type="application/json")

    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", "") != app.openapi_url
    ]
    app.add_route(app.openapi_url, document, include_in_schema=False)
