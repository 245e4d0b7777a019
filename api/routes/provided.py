"""Types of route parameters, each for one of the app's services (api/services.py)."""

from typing import Annotated, Any

from fastapi import Depends, Request

from api.edge.doorkeeper import Rates
from api.health.reading import HealthReader
from api.models.cache import ModelCache
from api.models.deployments import Deploying
from api.models.downloads import Downloads
from api.proofs.admission import Admission
from api.proofs.round_control import RoundControl
from api.proofs.waiting import InlineJobs
from api.reading.live import Live
from api.reading.together import Together
from poc_core.gpus import GpuWatch
from poc_core.joining.invitations import Invitations
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.events import Events
from poc_core.state.history import History
from poc_core.state.jobs import JobStore
from poc_core.state.overview import Overviews
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore


def provided(name: str) -> Any:
    """Returns a FastAPI dependency whose value is the attribute `name` of the app's Services."""

    # async: FastAPI runs a synchronous dependency in a thread
    async def of_app(request: Request) -> Any:
        return getattr(request.app.state.services, name)

    return Depends(of_app)


TheAdmission = Annotated[Admission, provided("admission")]
TheCache = Annotated[ModelCache, provided("model_cache")]
TheControl = Annotated[RoundControl, provided("round_control")]
TheDeploying = Annotated[Deploying, provided("deploying")]
TheDeployments = Annotated[DeploymentStore, provided("deployments")]
TheDownloads = Annotated[Downloads, provided("downloads")]
TheEvents = Annotated[Events, provided("events")]
TheGpus = Annotated[GpuWatch, provided("gpus")]
TheHealth = Annotated[HealthReader, provided("health")]
TheHistory = Annotated[History, provided("history")]
TheInline = Annotated[InlineJobs, provided("inline")]
TheInvitations = Annotated[Invitations, provided("invitations")]
TheJobs = Annotated[JobStore, provided("jobs")]
TheLive = Annotated[Live, provided("live")]
TheOverviews = Annotated[Overviews, provided("overviews")]
TheRates = Annotated[Rates, provided("token_rates")]
TheRounds = Annotated[RoundStore, provided("rounds")]
TheSettings = Annotated[Settings, provided("settings")]
TheTogether = Annotated[Together, provided("together")]
TheWorkers = Annotated[WorkerRegistry, provided("workers")]
