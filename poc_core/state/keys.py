"""Names of the keys in Redis. The scripts in lua/ derive further names from them."""

NEWEST_JOBS = "poc:jobs:newest"  # list of the ids of the jobs created last, the newest first
QUEUED_NONCES = "poc:queued_nonces"  # counter of accepted nonces that are not computed yet
ACTIVE_MODELS = "poc:jobs:models"  # set of the models that have an active zset
STATS_TOTAL = "poc:stats:total"  # counter of computed nonces
VERDICTS = "poc:stats:verdicts"  # hash verdict -> completed validations
EVENTS = "poc:events"  # counter of all events; see events() for their lists

WORKER_PREFIX = "poc:worker:"
WORKERS = "poc:workers"  # zset worker id -> last heartbeat
CHAT_PORTS = "poc:ports"  # zset port where a worker serves chat -> last heartbeat
API_ADDRESSES = "poc:api"  # zset "address port" of an API -> last report
MODELS = "poc:models"  # hash model -> json {"info", "seen_at"}

# hash: the model that the node shall serve; without a TTL, so that it survives a long downtime
DEPLOYMENT = "poc:deployment"
HOSTS = "poc:hosts"  # zset host id -> last report

# zset fingerprint of a refused chat request -> end of the refusal; and counter of such requests
DEADLY = "poc:chat:deadly"
DEADLY_TOTAL = "poc:chat:deadly:total"

NEWEST_ROUNDS = "poc:rounds:newest"  # list of the ids of the rounds stored last
CURRENT_ROUND = "poc:round:current"  # id of the round that /status, /stop and /phase use
FOLLOWED_ROUNDS = "poc:round:followed"  # set of superseded rounds, not deleted yet
OUTBOX_DUE = "poc:outbox:due"  # zset outbox id -> when its next delivery is due
# hash of jobs with an undelivered callback: id -> creation time, receiver, client (by spaces)
OUTBOX_JOBS = "poc:outbox:of_jobs"
COURIER = "poc:courier"  # expires COURIER_KNOWN_S after the last sign of life of a courier
COURIER_KNOWN_S = 86_400
RECEIVERS = "poc:receivers"  # zset receiver -> last time it did not answer


def round(round_id: str) -> str:
    """Returns the key of a round's hash. The round's other keys are this key plus :leases, :free,
    :workers, :counted, :excluded, :valid or :rate:{second}.
    """
    return f"poc:round:{round_id}"


def counted(round_id: str) -> str:
    """Returns the key of a round's latest counts: hash second|worker -> computed nonces. Once a
    second these counts are moved to other keys (`spread_counts` in lua/common.lua).
    """
    return f"{round(round_id)}:counted"


def generating(model: str) -> str:
    """Returns the key that stores the id of the round that generates with this model."""
    return f"poc:round:generating:{model}"


def outbox(outbox_id: str) -> str:
    """Returns the key of an outbox's hash. This key plus :entries is the list of its entries."""
    return f"poc:outbox:{outbox_id}"


def receiver(name: str) -> str:
    """Returns the key of the hash with a receiver's (host:port) failed deliveries."""
    return f"poc:receiver:{name}"


def job(job_id: str) -> str:
    """Returns the key of a job's hash. The job's other keys are this key plus :nonces, :todo,
    :free, :leases, :attempts, :values, :claimed, :finishing, or :result (a large answer's pieces).
    """
    return f"poc:job:{job_id}"


DOWNLOADS = "poc:downloads"  # hash of all downloads: repository@commit -> json
DOWNLOADS_WANTED = "poc:downloads:wanted"  # hash of active downloads: repository@commit -> task id
DOWNLOAD_SLOTS = "poc:downloads:slots"  # set of task ids that are active or have a process


def download(task_id: str) -> str:
    """Returns the key that exists while a download's process starts or runs."""
    return f"poc:download:{task_id}"


def active(model: str) -> str:
    """Returns the key of the zset of a model's queued and running jobs: job id -> creation time."""
    return f"poc:jobs:active:{model}"


def line(model: str) -> str:
    """Returns the key of the zset of a model's jobs that have batches to lease (`join_line`)."""
    return f"poc:jobs:line:{model}"


def reaper(model: str) -> str:
    """Returns the key that stores which worker checked a model for stuck jobs recently."""
    return f"poc:jobs:reaper:{model}"


def worker(worker_id: str) -> str:
    """Returns the key of a worker's hash. The key exists while the worker lives."""
    return WORKER_PREFIX + worker_id


def deaths(request: str) -> str:
    """Returns the key of the set of workers whose engines died during this chat request."""
    return f"poc:chat:deaths:{request}"


def host(host_id: str) -> str:
    """Returns the key of the hash of a host that follows the deployment, while the host lives."""
    return f"poc:host:{host_id}"


def host_logs(host_id: str) -> str:
    """Returns the key that stores the last log lines of a host's workers, as JSON."""
    return f"poc:host:{host_id}:logs"


def host_machine(host_id: str) -> str:
    """Returns the key that stores the measurements of a host's machine, as JSON."""
    return f"poc:host:{host_id}:machine"


def past(step_s: int, begin: int) -> str:
    """Returns the key of the hash of counts of one time step, which begins at the time `begin`."""
    return f"poc:past:{step_s}:{begin}"


def events(kind: str) -> str:
    """Returns the key of the list of the events of one kind, as JSON, the newest first."""
    return f"{EVENTS}:{kind}"


def validations(day: int) -> str:
    """Returns the key of the hash of a UTC day's validations: verdict -> number."""
    return f"poc:stats:validations:{day}"
