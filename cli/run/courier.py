"""`proofline courier`: runs the process that delivers callbacks."""

import os

from cli import options
from cli.terminal import note
from poc_core.settings import stranger_text, strangers
from workers.courier.main import run_courier
from workers.endings import end_process


def courier(redis_url: options.RedisUrl = None) -> None:
    """Deliver the callbacks of rounds and jobs until SIGTERM.

    Needs no GPU. Several couriers can run at the same time. Undelivered callbacks survive restarts
    of all processes, and are retried for POC_CALLBACK_RETENTION_SEC.
    """
    for name, meant in strangers(os.environ).items():
        note(f"courier: {stranger_text(name, meant)}")
    run_courier(redis_url)
    end_process()  # without waiting for threads that wait for Redis or DNS
