"""The app's services (api/services.py) as types of route parameters."""

from typing import Annotated, Any

from fastapi import Depends, Request

from api.edge import doorkeeper
from api.health import reading
from api.models import cache, deployments, downloads
from api.proofs import admission, round_control, waiting
from api.reading import live, together
from poc_core import gpus, settings
from poc_core.joining import invitations
from poc_core.state import events, history, overview
from poc_core.state.deployments import DeploymentStore
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore


def provided(name: str) -> Any:
    """Returns a FastAPI dependency whose value is the attribute `name` of the app's Services."""

    # async: FastAPI runs a synchronous dependency in a thread
    async def of_app(request: Request) -> Any:
        return getattr(request.app.state.services, name)

    return Depends(of_app)


Admission = Annotated[admission.Admission, provided("admission")]
Cache = Annotated[cache.ModelCache, provided("model_cache")]
Control = Annotated[round_control.RoundControl, provided("round_control")]
Deploying = Annotated[deployments.Deploying, provided("deploying")]
Deployments = Annotated[DeploymentStore, provided("deployments")]
Downloads = Annotated[downloads.Downloads, provided("downloads")]
Events = Annotated[events.Events, provided("events")]
Gpus = Annotated[gpus.GpuWatch, provided("gpus")]
Health = Annotated[reading.HealthReader, provided("health")]
History = Annotated[history.History, provided("history")]
Inline = Annotated[waiting.InlineJobs, provided("inline")]
Invitations = Annotated[invitations.Invitations, provided("invitations")]
Jobs = Annotated[JobStore, provided("jobs")]
Live = Annotated[live.Live, provided("live")]
Overviews = Annotated[overview.Overviews, provided("overviews")]
Rates = Annotated[doorkeeper.Rates, provided("token_rates")]
Rounds = Annotated[RoundStore, provided("rounds")]
Settings = Annotated[settings.Settings, provided("settings")]
Together = Annotated[together.Together, provided("together")]
Workers = Annotated[WorkerRegistry, provided("workers")]
