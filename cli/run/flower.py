"""`proofline flower`: runs Flower, Celery's web monitor, behind a password."""

import contextlib
import os
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer
from redis.exceptions import RedisError

from cli import options
from cli.supervise.ports import reserve_port
from cli.terminal import UsageError, note
from poc_core.redis_at.url import read_password
from poc_core.settings import load_settings
from poc_core.state import scripts
from poc_core.state.client import connect, refuse_wrong

AUTH = "FLOWER_BASIC_AUTH"  # Flower's variable: USER:PASSWORD, several separated by commas
USER = "proofline"
SCRIPTS_WAIT_S = 60.0
MAX_TASKS = 10_000  # tasks in Flower's memory; its default of 100,000 takes hundreds of MB


def flower(
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port to listen on.")] = 5555,
    redis_url: options.RedisUrl = None,
    password_file: Annotated[
        Path | None,
        typer.Option(
            envvar="PROOFLINE_FLOWER_PASSWORD_FILE",
            help=f"File with the password of the user {USER}. Default: FLOWER_BASIC_AUTH "
            "(USER:PASSWORD), otherwise a password is generated and printed.",
        ),
    ] = None,
    control: Annotated[
        bool,
        typer.Option("--control", help="Allow Flower's users to stop workers and revoke tasks."),
    ] = False,
) -> None:
    """Run Flower behind a password; Flower shows queues, tasks and workers in a browser.

    Makes all workers report task events, which costs half a millisecond of CPU time per task.
    """
    settings = load_settings()
    refuse_wrong(settings)
    reserve_port(host, port)
    # In the environment, because all users of the machine can read command lines.
    os.environ[AUTH] = credentials(password_file)
    os.environ.pop("FLOWER_UNAUTHENTICATED_API", None)
    flags = [
        f"--address={host}",
        f"--port={port}",
        f"--max_tasks={MAX_TASKS}",
        f"--read_only={not control}",
    ]
    celery = ["-P", "-m", "workers.queue.monitor", "-A", "workers.queue.app", "flower", *flags]
    with contextlib.suppress(RedisError):  # a starting API loads the scripts that Flower needs
        scripts.wait_until_loaded(connect(settings), SCRIPTS_WAIT_S)
    os.execv(sys.executable, [sys.executable, *celery])


def credentials(password_file: Path | None) -> str:
    """Returns USER:PASSWORD from the file or FLOWER_BASIC_AUTH, or generated. Raises UsageError."""
    if password_file is None:
        if os.environ.get(AUTH):
            return os.environ[AUTH]
        made_up = f"{USER}:{secrets.token_urlsafe(12)}"
        note(f"flower: the user and password of this run are {made_up}; choose others with {AUTH}")
        return made_up
    try:
        password = read_password("The password file", password_file)
    except ValueError as error:
        raise UsageError(f"{error}.") from None
    if not password or "," in password:
        raise UsageError(f"{password_file} must hold one password, without commas.")
    return f"{USER}:{password}"
