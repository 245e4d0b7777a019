"""`proofline key`: the API's keys."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from api.edge.keys import KeyFile, Role
from cli.terminal import note

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "Keys of the API. Their hashes are in the file POC_API_KEYS_FILE, which a running API reads"
        " again when it changes."
    ),
)

KeyName = Annotated[
    str, typer.Argument(help="Whose key it is, such as `aggregator`.", show_default=False)
]


@app.command()
def new(
    name: KeyName,
    roles: Annotated[
        list[Role],
        typer.Option("--role", help="What it may be used for; may be given several times."),
    ],
) -> None:
    """Make a key and show it, this once. Clients send it as `Authorization: Bearer KEY`.

    Our commands take the key from POC_API_KEY.

    **Example:** proofline key new aggregator --role proofs --role chat
    """
    file = _file()
    key = file.add(name, roles)
    note(
        f"key: {name} may be used for {', '.join(sorted(roles))}; it is shown only now, {file.path}"
        " has its hash:"
    )
    typer.echo(key)


@app.command("list")
def list_keys() -> None:
    """Show the names, roles and ages of all keys."""
    file = _file()
    keys = file.keys()
    if not keys:
        note(f"key: there is none in {file.path}")
    for key in keys:
        made = datetime.fromtimestamp(key.created_at, UTC).strftime("%Y-%m-%d %H:%M")
        typer.echo(f"{key.name}\t{','.join(sorted(key.roles))}\t{made}")


@app.command()
def revoke(name: KeyName) -> None:
    """Remove a key; the API refuses it from the next request on."""
    _file().revoke(name)
    note(f"key: {name} is revoked")


def _file() -> KeyFile:
    from poc_core.settings import load_settings

    return KeyFile(load_settings().api_keys_file)
