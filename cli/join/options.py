"""The command-line options for joining a node, shared by several commands."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

# Alternative to --token. Removed from the environment, because child processes inherit it.
TOKEN_VARIABLE = "PROOFLINE_JOIN_TOKEN"
DEFAULT_FILE = Path("~/.proofline/joined.json")


class Join(NamedTuple):
    """The options for the node to join, the token, and the file that stores the access."""

    join: Annotated[
        str | None,
        typer.Option(
            help="Join the node whose API is at https://HOST:PORT, with a token of `proofline hosts"
            " invite`. #sha256=FINGERPRINT at the end trusts that certificate alone."
        ),
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN_VARIABLE,
            help="The token. A list of processes shows it: better --token-file, or the variable.",
        ),
    ] = None
    token_file: Annotated[Path | None, typer.Option(help="File with the token.")] = None
    ca: Annotated[
        Path | None,
        typer.Option(
            help="File (PEM) with the certificates that the API is trusted by. Default: the"
            " system's."
        ),
    ] = None
    allow_http: Annotated[
        bool, typer.Option("--allow-http", help="Join without TLS, beyond loopback too.")
    ] = False
    join_file: Annotated[
        Path,
        typer.Option(help="Where this host keeps what it was given; a restart needs no token."),
    ] = DEFAULT_FILE
