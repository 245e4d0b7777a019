"""Names of the keys in Redis. The scripts in lua/ spell out suffixes and names made of ids."""

NEWEST_JOBS = "poc:jobs:newest"  # list of the ids of the jobs created last, the newest first
QUEUED_NONCES = "poc:queued_nonces"  # counter: accepted and not yet done
ACTIVE_MODELS = "poc:jobs:models"  # set of the models that have an active zset
STATS_TOTAL = "poc:stats:total"  # counter: nonces done
VERDICTS = "poc:stats:verdicts"  # hash: validations completed, by what they found
EVENTS = "poc:events"  # counter of the events told; each kind of them is a list, see events()

WORKER_PREFIX = "poc:worker:"
WORKERS = "poc:workers"  # zset worker id -> last heartbeat
CHAT_PORTS = "poc:ports"  # zset port on which a worker serves chat -> its last heartbeat
API_ADDRESSES = "poc:api"  # zset "address port" of an API's machine -> when it said so
MODELS = "poc:models"  # hash model -> json {"info", "seen_at"}

# hash: what the node shall run; no TTL, so that a node that was off for long finds it
DEPLOYMENT = "poc:deployment"
HOSTS = "poc:hosts"  # zset host id -> last report


# zset of the fingerprints of chat requests that are refused -> when each is no more, and how many
# there were
DEADLY = "poc:chat:deadly"
DEADLY_TOTAL = "poc:chat:deadly:total"

NEWEST_ROUNDS = "poc:rounds:newest"  # list of the ids of the rounds stored last
CURRENT_ROUND = "poc:round:current"  # id of the round that /status, /stop and /phase speak of
FOLLOWED_ROUNDS = "poc:round:followed"  # set of rounds that others followed, not forgotten yet
OUTBOX_DUE = "poc:outbox:due"  # zset outbox id -> when its next delivery is due
# hash of the jobs with a url that are not computed or not delivered: id -> when it came, receiver
# and client, with a space between them
OUTBOX_JOBS = "poc:outbox:of_jobs"
COURIER = "poc:courier"  # lives a day longer than the last sign of life of a courier
RECEIVERS = "poc:receivers"  # zset receiver -> when it last did not answer


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
    """Id of the round that all workers of the model compute for; absent while they serve jobs."""
    return f"poc:round:generating:{model}"


def outbox(outbox_id: str) -> str:
    """The hash of an outbox; its entries are the list this plus :entries."""
    return f"poc:outbox:{outbox_id}"


def receiver(name: str) -> str:
    """The hash of a receiver (host:port) that does not answer; absent when it does."""
    return f"poc:receiver:{name}"


def job(job_id: str) -> str:
    """The hash of a job; its working keys add :nonces :todo :free :leases :attempts :values
    :claimed :finishing, and :result with the pieces of a large answer.
    """
    return f"poc:job:{job_id}"


DOWNLOADS = "poc:downloads"  # hash of models that are or were downloaded: repository@commit -> json
DOWNLOADS_WANTED = "poc:downloads:wanted"  # hash of those that are: repository@commit -> task id
DOWNLOAD_SLOTS = "poc:downloads:slots"  # set of task ids: wanted, or with a process


def download(task_id: str) -> str:
    """Exists while a process downloads that model, or is being started."""
    return f"poc:download:{task_id}"


def active(model: str) -> str:
    """The zset job id -> creation time of the model's jobs that are queued or running."""
    return f"poc:jobs:active:{model}"


def line(model: str) -> str:
    """The zset of those of them with batches to lease, in the order of their turns; see join_line
    in lua/common.lua.
    """
    return f"poc:jobs:line:{model}"


def reaper(model: str) -> str:
    """Held by the worker whose turn it is to look for the model's stuck jobs."""
    return f"poc:jobs:reaper:{model}"


def worker(worker_id: str) -> str:
    """The hash of a worker; it exists while the worker lives."""
    return WORKER_PREFIX + worker_id


def deaths(request: str) -> str:
    """The set of the workers whose engines died while they had a chat request, by fingerprint."""
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
    """The hash of one step of the node's history, which begins at that second."""
    return f"poc:past:{step_s}:{begin}"


def events(kind: str) -> str:
    """The list of the events of one kind, as JSON, the newest first."""
    return f"{EVENTS}:{kind}"


def validations(day: int) -> str:
    """The hash of how many validations of a day (of UTC, since the epoch) found what."""
    return f"poc:stats:validations:{day}"
