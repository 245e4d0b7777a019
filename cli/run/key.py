"""`proofline key`: manages the API's keys."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from api.edge import keys
from cli.terminal import note
from poc_core.settings import load_settings

app = typer.Typer(no_args_is_help=True)

_NODE = "node"
RoleChoice = StrEnum("RoleChoice", [*(role.value for role in keys.Role), _NODE])  # type: ignore[misc]

KeyName = Annotated[str, typer.Argument(help="Name of the key's owner, such as `aggregator`.")]


@app.command()
def new(
    name: KeyName,
    roles: Annotated[
        list[RoleChoice],
        typer.Option(
            "--role",
            help="Role of the key; repeatable. `node` combines proofs, chat and deploy, for a "
            "network node that sends the key as its `auth_token`.",
        ),
    ],
) -> None:
    """Create a key and print it, only once. Clients send it as `Authorization: Bearer KEY`.

    The commands of `proofline` read the key from POC_API_KEY.

    **Example:** proofline key new aggregator --role proofs --role chat
    """
    file = _file()
    allowed = {keys.Role(role) for role in roles if role != _NODE}
    allowed |= keys.OF_NETWORK_NODE if _NODE in roles else set()
    key = file.add(name, allowed)
    note(
        f"key: {name} may be used for {', '.join(sorted(allowed))}; it is shown only now,"
        f" {file.path} has its hash:"
    )
    typer.echo(key)


@app.command("list")
def list_keys() -> None:
    """Show the names, roles and ages of all keys."""
    file = _file()
    found = file.keys()
    if not found:
        note(f"key: there is none in {file.path}")
    for key in found:
        made = datetime.fromtimestamp(key.created_at, UTC).strftime("%Y-%m-%d %H:%M")
        typer.echo(f"{key.name}\t{','.join(sorted(key.roles))}\t{made}")


@app.command()
def revoke(name: KeyName) -> None:
    """Remove a key; the API refuses it from the next request on."""
    _file().revoke(name)
    note(f"key: {name} is revoked")


def _file() -> keys.KeyFile:
    return keys.KeyFile(load_settings().api_keys_file)
