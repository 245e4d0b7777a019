"""Names of the keys in Redis. The scripts in lua/ write suffixes and names with ids."""

NEWEST_JOBS = "poc:jobs:newest"  # list of the ids of the jobs created last, the newest first
QUEUED_NONCES = "poc:queued_nonces"  # counter: accepted but uncomputed
ACTIVE_MODELS = "poc:jobs:models"  # set of the models that have an active zset
STATS_TOTAL = "poc:stats:total"  # counter: nonces computed
VERDICTS = "poc:stats:verdicts"  # hash: completed validations by verdict
EVENTS = "poc:events"  # counter of all events; see events() for their lists

WORKER_PREFIX = "poc:worker:"
WORKERS = "poc:workers"  # zset worker id -> last heartbeat
CHAT_PORTS = "poc:ports"  # zset port where a worker serves chat -> last heartbeat
API_ADDRESSES = "poc:api"  # zset "address port" of an API -> last report
MODELS = "poc:models"  # hash model -> json {"info", "seen_at"}

# hash: what the node shall run; without a TTL, so that it survives a long downtime
DEPLOYMENT = "poc:deployment"
HOSTS = "poc:hosts"  # zset host id -> last report


# zset of fingerprints of refused chat requests -> end of the refusal; and their total number
DEADLY = "poc:chat:deadly"
DEADLY_TOTAL = "poc:chat:deadly:total"

NEWEST_ROUNDS = "poc:rounds:newest"  # list of the ids of the rounds stored last
CURRENT_ROUND = "poc:round:current"  # id of the round that /status, /stop and /phase use
FOLLOWED_ROUNDS = "poc:round:followed"  # set of superseded rounds, not deleted yet
OUTBOX_DUE = "poc:outbox:due"  # zset outbox id -> when its next delivery is due
# hash of the jobs with an undelivered callback: id -> creation time, receiver and client, separated
# by spaces
OUTBOX_JOBS = "poc:outbox:of_jobs"
COURIER = "poc:courier"  # expires a day after the last sign of life of a courier
RECEIVERS = "poc:receivers"  # zset receiver -> last time it did not answer


def round(round_id: str) -> str:
    """The hash of a round; its working keys add :leases :free :workers :counted
    :excluded :valid :rate:{second}.
    """
    return f"poc:round:{round_id}"


def counted(round_id: str) -> str:
    """The hash of what a round's workers computed lately: second|worker -> nonces; see
    `spread_counts` in lua/common.lua.
    """
    return f"{round(round_id)}:counted"


def generating(model: str) -> str:
    """The id of the round that the model's workers compute for; absent while they serve jobs."""
    return f"poc:round:generating:{model}"


def outbox(outbox_id: str) -> str:
    """The hash of an outbox; this plus :entries is the list of entries."""
    return f"poc:outbox:{outbox_id}"


def receiver(name: str) -> str:
    """The hash of a receiver (host:port) that does not answer."""
    return f"poc:receiver:{name}"


def job(job_id: str) -> str:
    """The hash of a job; its working keys add :nonces :todo :free :leases :attempts :values
    :claimed :finishing, and :result with the pieces of a large answer.
    """
    return f"poc:job:{job_id}"


DOWNLOADS = "poc:downloads"  # hash of all downloads: repository@commit -> json
DOWNLOADS_WANTED = "poc:downloads:wanted"  # hash of active downloads: repository@commit -> task id
DOWNLOAD_SLOTS = "poc:downloads:slots"  # set of task ids: active, or with a process


def download(task_id: str) -> str:
    """Exists while a process downloads the model, or is starting."""
    return f"poc:download:{task_id}"


def active(model: str) -> str:
    """The zset job id -> creation time of the model's jobs that are queued or running."""
    return f"poc:jobs:active:{model}"


def line(model: str) -> str:
    """The zset of the model's jobs with batches to lease, in the order of leasing; see join_line in
    lua/common.lua.
    """
    return f"poc:jobs:line:{model}"


def reaper(model: str) -> str:
    """Held by the worker that last checked the model for stuck jobs."""
    return f"poc:jobs:reaper:{model}"


def worker(worker_id: str) -> str:
    """The hash of a worker; it exists while the worker lives."""
    return WORKER_PREFIX + worker_id


def deaths(request: str) -> str:
    """The set of workers whose engines died during a chat request (by fingerprint)."""
    return f"poc:chat:deaths:{request}"


def host(host_id: str) -> str:
    """The hash of a host that runs workers as deployed; it exists while the host lives."""
    return f"poc:host:{host_id}"


def host_logs(host_id: str) -> str:
    """The last lines of the host's workers, as JSON."""
    return f"poc:host:{host_id}:logs"


def host_machine(host_id: str) -> str:
    """The figures of the host's sensors, as JSON."""
    return f"poc:host:{host_id}:machine"


def past(step_s: int, begin: int) -> str:
    """The hash of one step of the history; `begin`: its first second."""
    return f"poc:past:{step_s}:{begin}"


def events(kind: str) -> str:
    """The list of one kind's events, as JSON, newest first."""
    return f"{EVENTS}:{kind}"


def validations(day: int) -> str:
    """The hash of validations per verdict on a UTC day since the epoch."""
    return f"poc:stats:validations:{day}"
