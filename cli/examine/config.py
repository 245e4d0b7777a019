"""`proofline config`: the settings in effect, and where each comes from."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from cli import options
from cli.terminal import note


def config(
    changed: Annotated[
        bool, typer.Option("--changed", help="Only those that are not the default.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="As JSON: {settings: [{name, value, source}], unknown: [...]}."
        ),
    ] = False,
    redis_url: options.RedisUrl = None,
) -> None:
    """Show every setting as a process started here would have it, and where it comes from.

    That is the default or the environment; of a .env in this folder, which Compose reads for its
    containers alone, it says what is in it and not in effect here. Passwords and keys are hidden.
    Names with POC_ that are no setting are told, with the one that may be meant.

    **Exit code:** 0, or 2 for a value that cannot be used.
    """
    from cli.examine.sources import others_in_effect, settings_in_effect, stranger_text, strangers
    from poc_core.settings import load_settings

    found = settings_in_effect(load_settings(), os.environ, Path(".env")) + others_in_effect(
        os.environ
    )
    if changed:
        found = [setting for setting in found if setting.source != "default"]
    unknown = strangers(os.environ)
    if as_json:
        typer.echo(
            json.dumps({"settings": [vars(setting) for setting in found], "unknown": list(unknown)})
        )
        return
    for setting in found:
        value = "unset" if setting.value is None else setting.value
        typer.echo(
            f"{setting.name} = {value}"
            + ("" if setting.source == "default" else f"    # {setting.source}")
        )
    for name, meant in unknown.items():
        note(stranger_text(name, meant))
