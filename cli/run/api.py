"""`proofline api`: runs the HTTP server, as one process."""

import ctypes
import gc
import os
import sys
from contextlib import suppress
from typing import Annotated

import typer
import uvicorn

from api.app import create_app
from api.edge import connections
from api.edge.doorkeeper import keys_wanted
from cli import options
from cli.addresses import receiver_settings
from cli.supervise.ports import bound
from cli.terminal import note
from poc_core.open_files import raise_file_limit
from poc_core.serving.logs import log_to_stderr
from poc_core.settings import load_settings, stranger_text, strangers
from poc_core.state.client import refuse_wrong

GRACEFUL_SHUTDOWN_S = 10  # for unfinished answers, such as a /generate with wait=true
# Python's switch interval: a thread that has read from Redis waits this long for a busy event loop,
# once per command. With the default of 5 ms, about ten waits were most of an answer's time.
_SWITCH_S = 0.0005
# Options of glibc's mallopt (malloc.h), and the block size from which malloc uses mmap: more than
# redis-py and httpx allocate for each read (64 KiB), less than most parts of a large body.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_OWN_BLOCK_BYTES = 72 * 1024


def api(
    host: options.Host = "127.0.0.1",
    ports: options.Ports = None,
    redis_url: options.RedisUrl = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
) -> None:
    """Run only the API, for Compose and for several hosts. `proofline up` runs the complete stack.

    If other hosts can reach the API, it answers only requests that have a key (`proofline key`) or
    come from POC_TRUSTED_NETWORKS, unless POC_REQUIRE_KEYS says otherwise. Further settings are
    environment variables that begin with POC_.
    """
    _give_memory_back()

    sockets = [bound(host, port) for port in ports or [options.DEFAULT_PORT]]
    listens_on = [one.getsockname()[1] for one in sockets]
    os.environ.update(receiver_settings(host, listens_on, os.environ))

    log_to_stderr()
    sys.setswitchinterval(_SWITCH_S)
    settings = load_settings()
    refuse_wrong(settings)
    for name, meant in strangers(os.environ).items():
        note(f"api: {stranger_text(name, meant)}")
    if keys_wanted(settings, host):
        note(
            f"api: clients need a key of {settings.api_keys_file.expanduser()}; `proofline key new`"
            " makes one"
        )
    most = connections.connections_for(connections.MAX_CONNECTIONS, raise_file_limit())
    app = create_app(settings, listens_on=host)
    app.openapi()  # cached here: generating it for the first request blocked the loop for 0.1 s
    # Existing objects live until the end; collecting them blocked requests for 0.1 s.
    gc.collect()
    gc.freeze()
    config = uvicorn.Config(
        app,
        access_log=access_log,
        http=connections.limited(connections.Limits(most)),
        ws="none",
        # A second limit: connections above the first limit are closed before they send a request.
        limit_concurrency=most + 2,
        # Trust depends on the peer's address, which no header may change.
        proxy_headers=False,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
    )
    note(f"api: listens on {host}, port {' and '.join(map(str, listens_on))}")
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets)


def _give_memory_back() -> None:
    """Makes glibc return large bodies' memory to the system, and use one heap for all threads.

    By default glibc keeps 180 MB between blocks that are in use, and 60 to 100 MB in the heaps of
    15 threads, although the GIL rarely lets two threads allocate at the same time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # neither musl nor macOS has it
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _OWN_BLOCK_BYTES)
