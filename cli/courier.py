"""`proofline courier`: the process that delivers callbacks."""

import os

from cli import options


def courier(redis_url: options.RedisUrl = None) -> None:
    """Deliver the callbacks of rounds and jobs until SIGTERM. Needs no GPU; one is enough, more do no harm.

    What cannot be delivered is kept and tried again for POC_CALLBACK_RETENTION_SEC, over restarts of any process.
    """
    if redis_url is not None:
        os.environ["POC_REDIS_URL"] = redis_url
    from workers.courier import run_courier

    run_courier(redis_url)
