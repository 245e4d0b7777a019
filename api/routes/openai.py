"""/v1: OpenAI's API. Forwards each request to a worker of the model, whose vLLM answers."""

import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
from anyio import sleep, to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from api.bodies import whole_body
from api.chat import fields, gateway, prefixes
from api.edge.shares import client_of
from api.errors import openai_error
from api.routes.services import AppServices, Services
from poc_core import chat_bounds
from poc_core.serving import openai_paths
from poc_core.serving.deployments import DeploymentState

T = TypeVar("T")

_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"description": "vLLM's answer, unchanged; with `stream` as server-sent events."},
    400: {
        "description": (
            "The body is no JSON object, does not name one of several models, or exceeds a limit"
            " of one request."
        )
    },
    404: {"description": "No worker serves this model; the message lists those that are served."},
    413: {"description": "The body has too many bytes or items."},
    "4XX": {"description": "vLLM's own refusal."},
    "5XX": {"description": "vLLM's own error."},
    503: {
        "description": (
            "The model has no ready worker, or POC_CHAT_POLICY is exclusive during a round."
        )
    },
}
_BODY = {
    "requestBody": {
        "description": "The body that vLLM documents for this path.",
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "model": {
                            "type": "string",
                            "description": "A served model; required if there are several.",
                        }
                    },
                },
            }
        },
    }
}
router = APIRouter(tags=["chat"], responses=_ANSWER)

# Suffixes of the paths that return embeddings.
_EMBEDDINGS = ("/embeddings", "/embed")
_MOST_PATH_CHARS = _MOST_NAME_CHARS = 80
# Largest body that is read on the event loop: in a millisecond at most. A thread would wait for the
# interpreter's lock, up to 5 ms each time, while the loop is busy.
_SMALL_BODY = 4096
# Seconds for a worker's list of models. The first pass is short: another worker of the model may
# answer at once. Both passes together are below the 5 s that the network node waits.
_LOOKUPS_S = (0.5, 4.0)
# Values that clients send for true.
_TRUE = (True, "true", "1")


async def proxy(request: Request, services: AppServices) -> Response:
    """Forwards the request to a worker of the body's `model`. vLLM documents the other fields."""
    # The route's own path: a Host header with # or / could change request.url's path.
    return await _pass_on(request, services, str(request.scope["route"].path))


async def _pass_on(request: Request, services: Services, path: str) -> Response:
    body = await whole_body(request)
    if body.count(b",") > chat_bounds.MAX_COMMAS:
        message = f"The body has more than {chat_bounds.MAX_COMMAS} items; split the request."
        return openai_error(413, message)
    workers = await services.gateway.workers.remembered()
    if found := chat_bounds.known_excess(body, (worker.info for worker in workers if worker.info)):
        return openai_error(400, found.message)
    try:
        asked = await _parsed(request.headers.get("content-type", ""), body, services)
    except fields.UnreadableError as error:
        return openai_error(400, str(error), param=error.param)
    model = asked.get("model") or None  # to vLLM, an empty name is no name
    if model not in {worker.model for worker in workers}:
        workers = await services.gateway.workers.now()  # reads again before a client is refused
    models = sorted({worker.model for worker in workers})
    is_stored = openai_paths.is_among(openai_paths.STORED, request.method, path)
    if model is None and len(models) > 1 and not is_stored:
        return openai_error(400, f"Name a model: {', '.join(models)}.")
    of_model = [worker for worker in workers if model is None or worker.model == model]
    if not of_model:
        return await to_thread.run_sync(_nobody, model, models, services)
    chosen = [
        worker
        for worker in of_model
        if openai_paths.is_among(worker.chat_paths, request.method, path)
    ]
    if not chosen:
        return _not_served(of_model[0].model, path)
    infos = [worker.info for worker in chosen if worker.info is not None]
    bound = await _called(body, chat_bounds.excess, path, asked, infos)
    if isinstance(bound, chat_bounds.Excess):
        return openai_error(400, bound.message, param=bound.field)
    query = request.scope["query_string"]
    target = path.encode() + (b"?" + query if query else b"")
    client = client_of(request.scope)
    more: dict[str, Any] = {}
    if bound is not None:
        more["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = bound
    if request.app.state.salts_caches and path in chat_bounds.SALTED:
        more["cache_salt"] = fields.salt_of(client, asked)
    asked, body = await _called(body, fields.extended, asked, body, more)
    salt = more.get("cache_salt", "")
    # A single worker needs no prefix.
    is_read = len(chosen) > 1 and len(body) <= prefixes.MAX_BODY
    prefix = await _called(body, prefixes.prefix_of, asked) if is_read else prefixes.NO_PREFIX
    is_stream = (
        asked.get("stream") in _TRUE and openai_paths.PATHS.get(path, ("", ()))[0] == "answers"
    )
    by_id = is_stored or asked.get("previous_response_id") is not None
    sent = gateway.ProxyRequest(
        request.method, target, request.headers.raw, body, prefix, client, salt, is_stream, by_id
    )
    return gateway.ProxiedAnswer(services.gateway, services.gateway.by_prefix(chosen, prefix), sent)


async def _called(body: bytes, function: Callable[..., T], *args: Any) -> T:
    """Calls a function that parses `body`: in a thread, or directly if the body is small."""
    if len(body) <= _SMALL_BODY:
        return function(*args)
    return await to_thread.run_sync(function, *args)


async def _parsed(content_type: str, body: bytes, services: Services) -> dict[str, Any]:
    """Returns `fields_of` the body. Parsing blocks all other work of this process, so large bodies
    are parsed one at a time, and each parsing is followed by a pause that lasts as long.
    """
    if len(body) <= prefixes.MAX_BODY:
        return await _called(body, fields.fields_of, content_type, body)
    async with services.large_chats:
        began_at = time.monotonic()
        try:
            return await to_thread.run_sync(fields.fields_of, content_type, body)
        finally:
            await sleep(time.monotonic() - began_at)


# Paths that a worker of an earlier release serves too.
for _path in (one.removeprefix("POST ") for one in openai_paths.USUAL):
    router.add_api_route(
        _path,
        proxy,
        methods=["POST"],
        summary=f"Forward {_path} to vLLM",
        openapi_extra=_BODY,
    )


# Without this path, the next route would look for a model with an empty name.
@router.get("/v1/models/", include_in_schema=False)
@router.get("/v1/models", summary="List the models of all workers")
async def models(request: Request, services: AppServices) -> Response:
    """Lists the served models, each with the entry that its worker's vLLM returns."""
    entries, refusal = await _entries(request, services)
    if refusal is not None and not entries:
        return Response(refusal.content, refusal.status_code, media_type="application/json")
    return JSONResponse({"object": "list", "data": list(entries.values())})


@router.get("/v1/models/{model:path}", summary="Show one model")
async def model(request: Request, services: AppServices, model: str) -> Response:
    """Returns a model's entry of /v1/models. The name may contain slashes, escaped or not."""
    entries, refusal = await _entries(request, services)
    if model in entries:
        return JSONResponse(entries[model])
    if refusal is not None and not entries:
        return Response(refusal.content, refusal.status_code, media_type="application/json")
    return await to_thread.run_sync(_nobody, model, sorted(entries), services)


async def _entries(
    request: Request, services: Services
) -> tuple[dict[str, Any], httpx.Response | None]:
    """Asks workers for /v1/models. Returns entries by model, and the last error answer if any."""
    entries: dict[str, Any] = {}
    refusal: httpx.Response | None = None
    # vLLM's --api-key
    key = [header for header in request.headers.raw if header[0] == b"authorization"]
    workers = await services.gateway.workers.now()
    for timeout_s, worker in itertools.product(_LOOKUPS_S, workers):
        if worker.model in entries:
            continue
        try:
            answer = await services.gateway.look_up(worker, b"/v1/models", key, timeout_s)
            if answer.status_code == 200:
                found = {str(entry["id"]): entry for entry in answer.json()["data"]}
                JSONResponse(found)  # ValueError for what JSON lacks, such as NaN
                entries |= found
            else:
                refusal = answer
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, RecursionError):
            continue  # perhaps another worker of the model answers correctly
    return entries, refusal


async def other(request: Request, services: AppServices) -> Response:
    """Forwards requests on other paths of vLLM, such as /v1/messages or /score, to a worker."""
    path = request.scope["path"]
    if not openai_paths.is_among(openai_paths.PASSED_ON, request.method, path):
        message = (
            f"The node does not forward this path. It forwards {', '.join(openai_paths.PASSED_ON)}."
        )
        return openai_error(404, message)
    return await _pass_on(request, services, path)


for _path in (
    *openai_paths.ELSEWHERE,
    *(f"{folder}{{path:path}}" for folder in openai_paths.FOLDERS),
):
    _methods = ["POST"] if _path in openai_paths.ELSEWHERE else ["GET", "POST", "DELETE"]
    router.add_api_route(_path, other, methods=_methods, include_in_schema=False)


def _not_served(model: str, path: str) -> Response:
    if path.endswith(_EMBEDDINGS):
        lacks = "makes no embeddings; deploy one that does, under its own name"
    else:
        lacks = f"has no {path[:_MOST_PATH_CHARS]}"
    return openai_error(404, f"The model `{model}` {lacks}.")


def _nobody(model: str | None, models: list[str], services: Services) -> Response:
    """Returns the error for a model without a ready worker: 503 if it may have one soon, else 404.

    After a 503 the network tries another node; for a 404 it convicts the executor.
    """
    # Checked in this order, because a model that is starting becomes known meanwhile.
    if (
        not models
        or any(worker.state == "starting" for worker in services.workers.live())
        or services.deployments.status().state is DeploymentState.STARTING
        or model in services.workers.known_models()
    ):
        who = f"the model {model[:_MOST_NAME_CHARS]}" if model else "a model"
        return openai_error(503, f"No worker serves chat for {who} right now; try again later.")
    name = str(model)[:_MOST_NAME_CHARS]
    message = f"The model `{name}` is not served here; use one of {', '.join(models)}."
    return openai_error(404, message, param="model")
