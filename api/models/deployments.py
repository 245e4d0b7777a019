"""Deploys a model on all hosts of the node, or stops it, and waits until the hosts are done."""

import logging
import time
from dataclasses import dataclass

import anyio
from anyio import to_thread
from fastapi import HTTPException, Request, Response

from api.bodies import DeployBody
from api.errors import Outlasting, unavailable
from poc_core import errors
from poc_core.answers import Done
from poc_core.records import RoundState
from poc_core.serving.deployments import DeploymentState, DeploymentStatus
from poc_core.serving.vllm_arguments import read_deployment
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.jobs import JobStore
from poc_core.state.rounds import RoundStore

log = logging.getLogger(__name__)

# Seconds between two checks of the hosts' reports, which arrive every second.
_LOOK_S = 0.2
# Seconds that a request waits for engines to end. Workers have 30 s for it, their guards 8 s more;
# a dead host is removed after 10 s.
_GONE_S = 60.0
# Seconds that a request waits for its model: less than the 900 that the network node waits.
SERVE_S = 870.0


@dataclass(frozen=True)
class Deploying:
    """Starts and stops the model on all hosts, as requested by the API's clients."""

    _settings: Settings
    _deployments: DeploymentStore
    _rounds: RoundStore
    _jobs: JobStore

    def deploy(self, body: DeployBody) -> int:
        """Makes all hosts start a model. Ends the round and all jobs of the earlier model.

        Returns the deployment's generation number. BodyError if a vLLM argument is not allowed.
        HTTPException 409 if a model runs or starts, 503 if there is no host.
        """
        trusted = self._settings.trusted
        try:
            wanted = read_deployment(body.model, body.dtype, body.additional_args, trusted)
            for told in wanted.left_out:
                log.warning("deployment of %s: left out %s", body.model, told)
            status = self._deployments.status()
            if status.hosts and status.state in (DeploymentState.IDLE, DeploymentState.FAILED):
                # Also before `deploy`: if Redis is lost after it, a repeated request is refused.
                self._end_work()
            generation = self._deployments.deploy(wanted)
        except errors.ArgumentsError as error:
            field = ("additional_args",)
            raise errors.BodyError(str(error), field, "deployment_arguments") from None
        except errors.DeployedError as error:
            raise HTTPException(409, str(error)) from None
        except errors.NoHostError as error:
            raise unavailable(str(error)) from None
        # Old work, such as that of a failed model, would prevent the next round from starting.
        self._end_work()
        return generation

    def withdraw(self, keeps: bool) -> int:
        """Makes all hosts stop the model. Ends the round and all jobs. Returns the deployment's
        generation number. `keeps`: True if engines that are loading are kept for a while.
        """
        self._end_work()
        return self._deployments.withdraw(keeps)

    async def until_served(self, request: Request, generation: int) -> Response | Done:
        """Waits until a host serves the model. Raises HTTPException 500 if the deployment fails or
        takes longer than SERVE_S seconds.
        """
        redis, deadline = Outlasting(), time.monotonic() + SERVE_S
        while time.monotonic() < deadline:
            status = await redis.read(self._deployments.status)
            if status is None:
                await anyio.sleep(_LOOK_S)
                continue
            if status.record is None or status.record.generation != generation:
                raise HTTPException(500, "The deployment was withdrawn before the model served.")
            if status.state is DeploymentState.RUNNING:
                return Done()
            if status.state is DeploymentState.FAILED:
                raise HTTPException(500, f"The model could not be started: {status.record.error}")
            if not status.hosts:
                raise HTTPException(
                    500,
                    "All hosts that should start the model ended; the next host will start it.",
                )
            if await request.is_disconnected():
                return Response(status_code=499)
            await anyio.sleep(_LOOK_S)
        raise HTTPException(
            500,
            f"The model does not serve after {SERVE_S:g} s. It is still being started: look at GET "
            "/api/v1/inference/up/status.",
        )

    async def until_gone(self, generation: int) -> Done:
        """Waits until all hosts have ended their engines. Raises HTTPException 500 if an engine
        still runs after _GONE_S seconds.
        """
        redis, deadline = Outlasting(), time.monotonic() + _GONE_S
        while True:
            status = await redis.read(self._deployments.status)
            if status is None:
                await anyio.sleep(_LOOK_S)
                continue
            superseded = status.record is not None and status.record.generation > generation
            if superseded:
                return Done()
            if status.is_gone:
                # Workers were ready until now, so other clients' requests may have added work.
                await to_thread.run_sync(self._end_work)
                return Done()
            if time.monotonic() > deadline:
                raise HTTPException(
                    500, f"Engines still end on {_busy(status)}; look into the logs there."
                )
            await anyio.sleep(_LOOK_S)

    def _end_work(self) -> None:
        current = self._rounds.current()
        if current is not None:
            self._rounds.switch(current, RoundState.STOPPED)
        self._jobs.cancel_all()


def _busy(status: DeploymentStatus) -> str:
    return ", ".join(
        f"{host.host} ({host.state.lower()})"
        for host in status.hosts
        if host.state not in ("IDLE", "KEEPING")
    )
