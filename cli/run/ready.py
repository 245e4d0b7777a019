"""`proofline ready`: checks whether a worker of this host is ready; meant for health checks."""

import os
import socket

from redis.exceptions import RedisError

from cli import options
from cli.join.joining import use_stored_access
from cli.terminal import note
from poc_core.errors import ProoflineError
from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry


def ready(redis_url: options.RedisUrl = None) -> None:
    """Print how many workers of this host are ready; exit with code 1 if none is ready.

    For health checks. If this host runs a part of another host's engine, it is ready when that
    engine is ready. The API answers /readyz for all hosts together.
    """
    use_stored_access(os.environ)
    settings = load_settings()
    redis = connect(settings)
    try:
        own = WorkerRegistry(redis, settings).here()
        parts = [host for host in DeploymentStore(redis, settings).hosts() if host.follows]
    except RedisError as error:
        raise ProoflineError(
            f"Redis does not answer ({error}); check POC_REDIS_URL and that it runs."
        ) from error
    for part in parts:
        if part.host == settings.host and part.ready:
            note(f"The part of the engine at {part.follows} on {part.host} is ready.")
            return
    at_work = sum(worker.is_ready for worker in own)
    message = f"{at_work} of {len(own)} worker(s) on {socket.gethostname()} are ready."
    if not at_work:
        raise ProoflineError(message)
    note(message)
