"""`proofline config`: shows the settings in effect, and where each was set."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from cli import options
from cli.examine.sources import others_in_effect, settings_in_effect
from cli.terminal import note
from poc_core.settings import load_settings, stranger_text, strangers


def config(
    changed: Annotated[
        bool, typer.Option("--changed", help="Show only settings that differ from the defaults.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON: {settings: [{name, value, source}], unknown: [...]}."
        ),
    ] = False,
    redis_url: options.RedisUrl = None,
) -> None:
    """Show every setting in effect for a process started here, and its source.

    Values come from defaults and the environment. The .env file of this folder is read only by
    Compose; its settings are shown as not in effect. Passwords and keys are hidden. Unknown
    variables that begin with POC_ are reported, each with the most similar setting.

    **Exit code:** 0, or 2 if a value cannot be used.
    """
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
    if changed and not found:
        note("Nothing differs from the defaults.")
    for name, meant in unknown.items():
        note(stranger_text(name, meant))
