"""/api/v1/models: models in this machine's Hugging Face cache. The paths are those of MLNode."""

import time
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Annotated, Literal, ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, HTTPException
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from api.errors import unavailable
from api.models.cache import CacheError, DiskSpace
from api.models.files import printable
from api.routes import examples
from api.routes.services import AppServices
from poc_core.state.downloads import MOST_AT_A_TIME

router = APIRouter(prefix="/api/v1/models", tags=["aggregator"], responses=examples.REDIS_AWAY)

P = ParamSpec("P")
T = TypeVar("T")

# Threads of all routes below. If a disk hangs, the API's other routes keep their own threads.
_threads = CapacityLimiter(4)

ModelStatus = Literal["DOWNLOADED", "DOWNLOADING", "PARTIAL", "NOT_FOUND"]


def _repository(name: str) -> str:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(str(error)) from None
    return name


class HubModel(BaseModel):
    hf_repo: Annotated[
        str, Field(max_length=96, examples=["Qwen/Qwen3-8B"]), AfterValidator(_repository)
    ]
    hf_commit: Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]{0,127}$")] | None = None


class DownloadProgress(BaseModel):
    start_time: float = Field(description="Seconds since the epoch.")
    elapsed_seconds: float


class OneStatus(BaseModel):
    model: HubModel
    status: ModelStatus
    progress: DownloadProgress | None = None
    error_message: str | None = Field(
        None, description="Why the last download failed or the model cannot be read; or null."
    )


class Task(BaseModel):
    task_id: str
    status: ModelStatus
    model: HubModel


class Deleted(BaseModel):
    status: Literal["deleted", "cancelled"]
    model: HubModel


Printable = Annotated[str, BeforeValidator(printable)]


class ModelOnDisk(BaseModel):
    hf_repo: Printable
    hf_commit: Printable | None = Field(description="null if the model's revisions cannot be read.")


class Listed(BaseModel):
    model: ModelOnDisk
    status: ModelStatus
    error_message: str | None = Field(None, description="Why the model cannot be read, or null.")


class AllListed(BaseModel):
    models: list[Listed]


def _on_disk(route: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    @wraps(route)
    async def in_a_thread(*args: P.args, **named: P.kwargs) -> T:
        return await to_thread.run_sync(partial(route, *args, **named), limiter=_threads)

    return in_a_thread


@router.post("/status", summary="Check whether a model is on disk")
@_on_disk
def status(model: HubModel, services: AppServices) -> OneStatus:
    """Looks in the Hugging Face cache of the API's machine. Without hf_commit, checks the revision
    `main`, or any revision if there is no `main`.
    """
    cache = services.model_cache
    found = services.downloads.store.read(model.hf_repo, model.hf_commit)
    if found is not None and found.state == "running":
        elapsed_s = max(0.0, time.time() - found.started_at)
        progress = DownloadProgress(start_time=found.started_at, elapsed_seconds=elapsed_s)
        return OneStatus(model=model, status="DOWNLOADING", progress=progress)
    stage, error = cache.stage(model.hf_repo, model.hf_commit), None
    if stage != "DOWNLOADED":
        error = found.error if found is not None else cache.trouble(model.hf_repo, model.hf_commit)
    return OneStatus(model=model, status=stage, error_message=error)


@router.post(
    "/download", summary="Download a model", status_code=202, responses=examples.DOWNLOAD_ERRORS
)
@_on_disk
def download(model: HubModel, services: AppServices) -> Task:
    """Starts a download, which continues if the API restarts. Resumes an incomplete download.

    409 while this model is downloaded or HF_HUB_OFFLINE is set; 429 during three other downloads.
    """
    cache, downloads = services.model_cache, services.downloads
    if cache.stage(model.hf_repo, model.hf_commit) == "DOWNLOADED":
        return Task(task_id="", status="DOWNLOADED", model=model)
    if why_not := cache.offline(model.hf_repo):
        raise HTTPException(409, why_not)
    started = downloads.store.start(model.hf_repo, model.hf_commit, downloads.machine)
    if started == "running":
        raise HTTPException(
            409,
            f"{model.hf_repo} is being downloaded already; /api/v1/models/status shows the"
            " progress.",
        )
    if started == "full":
        raise unavailable(
            f"{MOST_AT_A_TIME} models are being downloaded, the most allowed; try again later.", 429
        )
    downloads.begin(started)
    return Task(task_id=started.task_id, status="DOWNLOADING", model=model)


@router.delete(
    "", summary="Delete a model from disk, or cancel its download", responses=examples.DELETE_ERRORS
)
@_on_disk
def delete(model: HubModel, services: AppServices) -> Deleted:
    """Deletes a revision of the model from disk; without hf_commit, all of its revisions.

    409 if a worker serves the model or a file cannot be deleted; 404 if the model is not on disk.
    """
    downloads, commits = services.downloads.store, {model.hf_commit}
    if model.hf_commit is None:
        commits |= {one.hf_commit for one in downloads.running() if one.hf_repo == model.hf_repo}
    if sum(downloads.forget(model.hf_repo, commit) for commit in commits):
        return Deleted(status="cancelled", model=model)
    cache, wanted = services.model_cache, services.deployments.status().wanted
    workers = services.workers.live()
    served = {worker.model for worker in workers} | ({wanted.model} if wanted else set())
    if model.hf_repo in served:
        raise HTTPException(409, f"Workers serve {model.hf_repo}; deploy another model first.")
    try:
        was_there = cache.delete(model.hf_repo, model.hf_commit)
    except CacheError as error:
        raise HTTPException(409, str(error)) from None
    if not was_there:
        raise HTTPException(404, f"{model.hf_repo} is not in the cache {cache.path}.")
    return Deleted(status="deleted", model=model)


@router.get("/list", summary="List the models on disk")
@_on_disk
def listed(services: AppServices) -> AllListed:
    """Lists all models in the Hugging Face cache of the API's machine."""
    cache = services.model_cache
    found = [
        Listed(
            model=ModelOnDisk(hf_repo=one.hf_repo, hf_commit=one.hf_commit), status="DOWNLOADING"
        )
        for one in services.downloads.store.running()
    ]
    try:
        on_disk = list(cache.models())
    except CacheError as error:
        raise unavailable(str(error)) from None
    for hf_repo, hf_commit, stage in on_disk:
        model = ModelOnDisk(hf_repo=hf_repo, hf_commit=hf_commit)
        trouble = None if stage == "DOWNLOADED" else cache.trouble(hf_repo, hf_commit)
        found.append(Listed(model=model, status=stage, error_message=trouble))
    return AllListed(models=found)


@router.get("/space", summary="Show the disk space for models", responses=examples.CACHE_AWAY)
@_on_disk
def space(services: AppServices) -> DiskSpace:
    """Shows the size of the Hugging Face cache and the free space on its disk, in GB."""
    try:
        return services.model_cache.space()
    except CacheError as error:
        raise unavailable(str(error)) from None
