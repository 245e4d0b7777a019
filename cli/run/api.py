"""`proofline api`: the HTTP server, one process."""

import os
from typing import Annotated

import typer

from cli import options
from cli.addresses import receiver_settings

GRACEFUL_SHUTDOWN_S = 10  # for answers under way, such as a /generate with wait=true


def api(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port to listen on.")] = 8000,
    redis_url: options.RedisUrl = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
) -> None:
    """Run the API alone, for compose and for several hosts; `proofline up` runs everything on one machine.

    Further settings come from environment variables that begin with POC_.
    """
    import uvicorn

    os.environ.update(receiver_settings(host, port, os.environ))
    uvicorn.run(
        "api.app:create_app",
        factory=True,
        host=host,
        port=port,
        access_log=access_log,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
    )
