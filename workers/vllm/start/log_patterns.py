"""Patterns of log lines (vLLM, torch, Celery) that tell a supervisor why a worker ended."""

import re
from collections.abc import Sequence

from workers.engines.shortage import NO_MEMORY

READY = re.compile(r"\S+@\S+ ready\.$")  # Celery's message that a worker consumes
# An argument of vLLM that was left out, and the reason: the log message and its pattern.
LEAVES_OUT = "left out --%s: vLLM %s does not know it"
LEFT_OUT = re.compile(r"left out (--[\w-]+: vLLM \S+ does not know it)$")
ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
# The error message of a command, except vLLM's "See root cause above".
TELLING = re.compile(
    r"(^error: |^\w+: error: |\b[A-Z]\w*(?:Error|Exception): )(?!.*root cause above)"
)
# An engine ran out of memory.
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|No available memory for the cache blocks|is larger than the available KV"
    r" cache memory"
    r"|is less than (desired|requested memory)"
    rf"|{NO_MEMORY.pattern}"
)
# The hub's answers for a name that is unknown or not accessible, without network errors.
_NOT_ON_HUB = re.compile(
    r"Repository Not Found for url|Cannot access gated repo for url|'401 Unauthorized' for url"
    r" '\S+/api/models/"
    r"|is not a local folder and is not a valid model identifier"
)
# Errors about a model family (release/faults.py).
_OF_FAMILY = re.compile(
    r"\bvLLM \S+ (cannot compute \S+ on CPUs, |does not know models of the kind )"
)
DOES_NOT_FIT = (
    "the model does not fit: use more --tensor-parallel or --pipeline-parallel, after -- a smaller"
    " --max-model-len, or a smaller model; on a CPU a smaller VLLM_CPU_KVCACHE_SPACE (GiB)"
)
CORRUPTS_CHAT = (
    "proofs would corrupt this model's chat: choose a model that keeps its state in attention's"
    " caches only"
)
NOT_ON_HUB = (
    "the Hugging Face hub has no model of this name, or none for this node's HF_TOKEN: correct the"
    " name, or give a model's directory"
)
NOT_HERE = (
    "the model is not on this machine, and HF_HUB_OFFLINE forbids to ask the hub: download it first"
)
NEEDS_TRUST = (
    "the model needs code from its repository, which runs only where it is trusted: name it in"
    " POC_TRUSTED_MODELS as ORG/NAME@COMMIT and deploy it with --revision COMMIT and"
    " --trust-remote-code; or, with --model, put --trust-remote-code after --"
)
NO_OTHER_START = "another start would change nothing"  # the log's last line gives the reason
HOPELESS = {
    _NO_MEMORY: DOES_NOT_FIT,
    # state outside attention's caches (kv_isolation.py)
    re.compile(r"cannot be isolated from chat"): CORRUPTS_CHAT,
    _NOT_ON_HUB: NOT_ON_HUB,
    re.compile(r"outgoing traffic has been disabled"): NOT_HERE,
    re.compile(r"(setting|argument|option) `trust_remote_code=True`"): NEEDS_TRUST,
}


def why_hopeless(log: Sequence[str]) -> str | None:
    """Returns why a worker that failed to start would fail again, as its log shows, or None."""
    causes = HOPELESS | {_OF_FAMILY: NO_OTHER_START}
    return next(
        (why for cause, why in causes.items() if any(cause.search(line) for line in log)), None
    )
