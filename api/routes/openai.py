"""/v1: OpenAI's API over all workers; the worker's vLLM answers, this module picks the worker."""

from typing import Any

import httpx
from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from api.chat.bounds import excess
from api.chat.gateway import ProxiedAnswer, ProxyRequest
from api.chat.named_model import model_in
from api.chat.prefixes import NO_PREFIX, prefix_of
from api.edge.shares import client_of
from api.errors import openai_error
from api.schema.bodies import whole_body
from api.services import AppServices, Services
from poc_core.serving.openai_paths import ELSEWHERE, FOLDERS, is_among

router = APIRouter(tags=["chat"])

_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"description": "vLLM's answer, byte for byte; with `stream` as server-sent events."},
    400: {
        "description": (
            "The body is no JSON object, names no model where several are served, or asks for more"
            " answers or tokens than one request may."
        )
    },
    404: {"description": "No worker serves this model; the message lists those that are served."},
    413: {"description": "The body is over the limit, in bytes or items."},
    "4XX": {"description": "What else vLLM refuses, in its words."},
    "5XX": {"description": "What vLLM could not do, in its words."},
    503: {
        "description": (
            "The model's workers are away, or compute a round under POC_CHAT_POLICY=exclusive."
        )
    },
}
_BODY = {
    "requestBody": {
        "description": "As vLLM documents it for this path.",
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "model": {
                            "type": "string",
                            "description": (
                                "One that is served (GET /v1/models); needed where there are"
                                " several."
                            ),
                        }
                    },
                },
            }
        },
    }
}
# Commas of a chat body. Parsing holds the event loop by items, not by bytes: 33 MB of text or of a
# picture take 3 ms, half a million items 50 ms, 33 MB of short items 260 ms and 550 MB.
_MAX_COMMAS = 500_000


async def proxy(request: Request, services: AppServices) -> Response:
    """Passed on to the least busy worker of the body's `model`; see vLLM's documentation."""
    # The route's own path: a Host header with a # or a / in it can turn request.url's into any.
    return await _pass_on(request, services, str(request.scope["route"].path))


async def _pass_on(request: Request, services: Services, path: str) -> Response:
    body = await whole_body(request)
    if body.count(b",") > _MAX_COMMAS:
        message = f"The body has more than {_MAX_COMMAS} items; split the request."
        return openai_error(413, message, "invalid_request_error")
    try:
        model = await to_thread.run_sync(model_in, request.headers.get("content-type", ""), body)
    except ValueError:
        return openai_error(
            400,
            "The body must be a JSON object whose `model` is a string.",
            "invalid_request_error",
        )
    gateway = services.gateway
    workers = await gateway.workers.remembered()
    if model not in {worker.model for worker in workers}:
        workers = await gateway.workers.now()  # before anybody is refused
    chosen = [worker for worker in workers if model is None or worker.model == model]
    chosen = [
        worker for worker in chosen if is_among(worker.chat_paths, request.method, path)
    ] or chosen
    models = sorted({worker.model for worker in workers})
    if model is None and len(models) > 1:
        return openai_error(400, f"Name a model: {', '.join(models)}.", "invalid_request_error")
    if not chosen:
        return await to_thread.run_sync(_nobody, model, models, services)
    infos = [worker.info for worker in chosen if worker.info is not None]
    too_much = await to_thread.run_sync(excess, body, infos)
    if too_much is not None:
        return openai_error(400, too_much.message, "invalid_request_error", too_much.field)
    query = request.scope["query_string"]
    target = path.encode() + (b"?" + query if query else b"")
    # One worker has every prefix.
    prefix = await to_thread.run_sync(prefix_of, body) if len(chosen) > 1 else NO_PREFIX
    sent = ProxyRequest(
        request.method, target, request.headers.raw, body, prefix, client_of(request.scope)
    )
    return ProxiedAnswer(gateway, gateway.by_prefix(chosen, prefix), sent)


# Paths that a worker of an earlier release serves too.
for _path in (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
):
    router.add_api_route(
        _path, proxy, methods=["POST"], response_model=None, responses=_ANSWER, openapi_extra=_BODY
    )


@router.get(
    "/v1/models", summary="The models of all workers", response_model=None, responses=_ANSWER
)
async def models(request: Request, services: AppServices) -> Response:
    """One entry per served model, as its worker's vLLM describes it."""
    entries, refusal = await _entries(request, services)
    if refusal is not None and not entries:
        return Response(refusal.content, refusal.status_code, media_type="application/json")
    return JSONResponse({"object": "list", "data": list(entries.values())})


@router.get(
    "/v1/models/{model:path}",
    summary="One of the models",
    response_model=None,
    responses=_ANSWER,
)
async def model(request: Request, services: AppServices, model: str) -> Response:
    """A model's entry of /v1/models. Its name may hold slashes, escaped or not."""
    entries, refusal = await _entries(request, services)
    if model in entries:
        return JSONResponse(entries[model])
    if refusal is not None and not entries:
        return Response(refusal.content, refusal.status_code, media_type="application/json")
    return await to_thread.run_sync(_nobody, model, sorted(entries), services)


async def _entries(
    request: Request, services: Services
) -> tuple[dict[str, Any], httpx.Response | None]:
    """Each served model's entry by its name, and the last refusal of a worker, as of its key."""
    entries: dict[str, Any] = {}
    refusal: httpx.Response | None = None
    # vLLM's --api-key
    key = [header for header in request.headers.raw if header[0] == b"authorization"]
    for worker in await services.gateway.workers.now():
        if worker.model in entries:
            continue
        try:
            answer = await services.gateway.look_up(worker, b"/v1/models", key)
        except httpx.HTTPError:
            continue  # another worker of the model may answer
        if answer.status_code == 200:
            entries |= {entry["id"]: entry for entry in answer.json()["data"]}
        else:
            refusal = answer
    return entries, refusal


async def other(request: Request, services: AppServices) -> Response:
    """Other paths of a worker's vLLM, such as /v1/messages or /score; none that administers it."""
    workers = await services.gateway.workers.remembered() or await services.gateway.workers.now()
    wanted: str = request.scope["path"]
    if workers and not any(
        is_among(worker.chat_paths, request.method, wanted) for worker in workers
    ):
        return openai_error(404, "No model that is served here has this path.", "NotFoundError")
    if not workers:
        return await to_thread.run_sync(_nobody, None, [], services)
    return await _pass_on(request, services, wanted)


for _path in (*ELSEWHERE, *(f"{folder}{{path:path}}" for folder in FOLDERS)):
    _methods = ["POST"] if _path in ELSEWHERE else ["GET", "POST", "DELETE"]
    router.add_api_route(
        _path, other, methods=_methods, include_in_schema=False, response_model=None
    )


def _nobody(model: str | None, models: list[str], services: Services) -> Response:
    """404 for a model that is not served here, 503 for one whose workers are away."""
    known = services.workers.known_models()
    if (model is None and not models) or model in known:
        who = f"the model {model}" if model else "a model"
        return openai_error(
            503,
            f"No worker serves chat for {who} right now; try again later.",
            "service_unavailable",
        )
    served = f"; ask for one of {', '.join(models)}" if models else ""
    return openai_error(
        404, f"The model `{model}` is not served here{served}.", "NotFoundError", "model"
    )
