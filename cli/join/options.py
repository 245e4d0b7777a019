"""The command-line options for joining a node, shared by several commands."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

# Alternative to --token. Removed from the environment, because child processes inherit it.
TOKEN_VARIABLE = "PROOFLINE_JOIN_TOKEN"
DEFAULT_FILE = Path("~/.proofline/joined.json")


class Join(NamedTuple):
    """Options: the node to join, the token, and the file in which this host stores its access."""

    join: Annotated[
        str | None,
        typer.Option(
            help="Join the node whose API is at https://HOST:PORT, with a token of `proofline "
            "hosts invite`. Append #sha256=FINGERPRINT to trust only that certificate."
        ),
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN_VARIABLE,
            help="The token. Other users can see it in the process list: prefer --token-file or "
            "the variable.",
        ),
    ] = None
    token_file: Annotated[Path | None, typer.Option(help="File that contains the token.")] = None
    ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with the authorities for the API's certificate. Default: the system's."
        ),
    ] = None
    allow_http: Annotated[
        bool, typer.Option("--allow-http", help="Allow joining without TLS beyond loopback.")
    ] = False
    join_file: Annotated[
        Path,
        typer.Option(
            help="File in which this host stores the received settings; a restart needs no token."
        ),
    ] = DEFAULT_FILE
