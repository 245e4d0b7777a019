"""State in Redis: jobs, rounds, callbacks, workers, and the deployment.

One module per structure; each multi-step change is one Lua script. Every key starts with `poc:` and
has a TTL, but for the deployment (deployments.py). The scripts derive key names from the job's key,
so a Redis Cluster, which wants all keys named in advance and on one server, is refused
(poc_core/redis_at).
"""

from poc_core.state.client import connect
from poc_core.state.delivery.outbox import Outbox
from poc_core.state.deployments import DeploymentStore
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore

__all__ = ["DeploymentStore", "JobStore", "Outbox", "RoundStore", "WorkerRegistry", "connect"]
