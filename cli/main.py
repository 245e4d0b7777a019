"""The command `proofline`, which imports a subcommand's module when that subcommand is called.

`proofline --help` imports none of these modules: it reads the docstrings from their files.
"""

import ast
import os
from collections import UserDict
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from api.version import VERSION
from cli.terminal import EXIT_INTERRUPTED, exit_code_of, show_error
from poc_core.errors import ProoflineError

ROOT = Path(__file__).parents[1]

RUNNING = "Run"
ASKING = "Ask a running API"
EXAMINING = "Look at this machine"
ALONE = "Without a queue"


class Command(NamedTuple):
    """A subcommand: where it is defined, its panel in --help, and a help text if it is a group."""

    target: str
    panel: str | None
    help: str = ""

    def load(self, name: str) -> Any:
        module, _, attribute = self.target.partition(":")
        found = getattr(import_module(module), attribute)
        app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, help=self.help, rich_help_panel=self.panel)
            return typer.main.get_group(app).commands[name]
        app.command(name, rich_help_panel=self.panel, hidden=self.panel is None)(found)
        return typer.main.get_command(app)

    def summary(self, name: str) -> TyperCommand:
        """Returns the entry for `proofline --help`, without importing the subcommand's module."""
        module, _, attribute = self.target.partition(":")
        file = (ROOT / module.replace(".", "/")).with_suffix(".py")
        functions = (
            node
            for node in ast.parse(file.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef) and node.name == attribute
        )
        text = self.help or next(ast.get_docstring(node) or "" for node in functions)
        return TyperCommand(name, help=text, rich_help_panel=self.panel, hidden=self.panel is None)


COMMANDS = {
    "demo": Command("cli.supervise.demo:demo", RUNNING),
    "up": Command("cli.supervise.up:up", RUNNING),
    "api": Command("cli.run.api:api", RUNNING),
    "worker": Command("cli.run.worker:worker", RUNNING),
    "supervised-worker": Command("cli.run.worker:supervised_worker", None),
    "workers": Command("cli.supervise.workers:workers", RUNNING),
    "courier": Command("cli.run.courier:courier", RUNNING),
    "flower": Command("cli.run.flower:flower", RUNNING),
    "ready": Command("cli.run.ready:ready", RUNNING),
    "key": Command(
        "cli.run.key:app",
        RUNNING,
        "Make, list and revoke keys of the API. Their hashes are in the file POC_API_KEYS_FILE,"
        " which a running API reads again when it changes.",
    ),
    "hosts": Command(
        "cli.join.hosts:app",
        RUNNING,
        "Invite, list and revoke hosts, which join with one token (`proofline workers --join`)."
        " Each host gets its own Redis user. POC_REDIS_URL must name the operator's user.",
    ),
    "receive": Command("cli.run.receive:receive", RUNNING),
    "doctor": Command("cli.examine.doctor:doctor", EXAMINING),
    "config": Command("cli.examine.config:config", EXAMINING),
    "status": Command("cli.ask.status:status", ASKING),
    "generate": Command("cli.ask.generate:generate", ASKING),
    "validate": Command("cli.ask.validate:validate", ASKING),
    "chat-check": Command("lab.judge.chat_check:chat_check", ASKING),
    "deploy": Command("cli.ask.deploy:deploy", ASKING),
    "undeploy": Command("cli.ask.deploy:undeploy", ASKING),
    "round": Command(
        "cli.ask.round:app",
        ASKING,
        "Start, watch and stop a round, in which all workers of a model compute nonces until you"
        " stop the round.",
    ),
    "compute": Command("lab.judge.compute:compute", ALONE),
    "calibrate": Command("lab.judge.calibrate:calibrate", ALONE),
    "bench": Command("lab.measure.bench:bench", ALONE),
    "report": Command("lab.judge.report:report", ALONE),
}


class LoadedWhenCalled(UserDict[str, Any]):
    """The subcommands by name, each of which is imported at its first lookup."""

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, Command):
            found = self.data[name] = found.load(name)
        return found


class ProoflineGroup(TyperGroup):
    """A command group that prints a ProoflineError in one line, and sets the exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ProoflineError as error:
            show_error(error)
            raise typer.Exit(exit_code_of(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


class LazyGroup(ProoflineGroup):
    """The group `proofline`, which imports a subcommand's module when that subcommand is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = LoadedWhenCalled(COMMANDS)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for argument in args:
            if any("\ud800" <= character <= "\udfff" for character in argument):
                given = os.fsencode(argument)
                raise typer.BadParameter(f"The argument {given!r} is not UTF-8; give it in UTF-8.")
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        listed = copy(self)
        listed.commands = {name: command.summary(name) for name, command in COMMANDS.items()}
        super(LazyGroup, listed).format_help(ctx, formatter)


app = typer.Typer(
    name="proofline",
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A Proof-of-Compute node: FastAPI, Redis and Celery around vLLM engines.\n\n"
    "Exit codes: 0 done, 1 failed, 2 wrong options, 3 fraud found (validate, chat-check),"
    " 130 interrupted.",
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"proofline {VERSION}")
        raise typer.Exit()


@app.callback()
def proofline(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    app()
