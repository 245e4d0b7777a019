"""The command `proofline`: every command is a module of this package.

Commands import what they need when they run: `proofline --help` must not wait for torch.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cli.ask.chat_check import chat_check
from cli.ask.deploy import deploy, undeploy
from cli.ask.generate import generate
from cli.ask.round import app as round_app
from cli.ask.status import status
from cli.ask.validate import validate
from cli.examine.config import config
from cli.examine.doctor import doctor
from cli.judge.calibrate import calibrate
from cli.judge.compute import compute
from cli.judge.report import report
from cli.measure.bench import bench
from cli.run.api import api
from cli.run.courier import courier
from cli.run.demo import demo
from cli.run.flower import flower
from cli.run.hosts import app as hosts_app
from cli.run.key import app as key_app
from cli.run.ready import ready
from cli.run.receive import receive
from cli.run.up import up
from cli.run.worker import supervised_worker, worker
from cli.run.workers import workers
from cli.terminal import EXIT_INTERRUPTED, exit_code_of, show_error
from poc_core.errors import ProoflineError

RUNNING = "Run"
ASKING = "Ask a running API"
EXAMINING = "Look at this machine"
ALONE = "Without a queue"


class ProoflineGroup(TyperGroup):
    """Command group that shows Proofline's own errors as one line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ProoflineError as error:
            show_error(error)
            raise typer.Exit(exit_code_of(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    name="proofline",
    cls=ProoflineGroup,
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
        from api.version import VERSION

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


app.command(rich_help_panel=RUNNING)(demo)
app.command(rich_help_panel=RUNNING)(up)
app.command(rich_help_panel=RUNNING)(api)
app.command(rich_help_panel=RUNNING)(worker)
app.command(hidden=True)(supervised_worker)
app.command(rich_help_panel=RUNNING)(workers)
app.command(rich_help_panel=RUNNING)(courier)
app.command(rich_help_panel=RUNNING)(flower)
app.command(rich_help_panel=RUNNING)(ready)
app.add_typer(key_app, name="key", rich_help_panel=RUNNING)
app.add_typer(hosts_app, name="hosts", rich_help_panel=RUNNING)
app.command(rich_help_panel=RUNNING)(receive)
app.command(rich_help_panel=EXAMINING)(doctor)
app.command(rich_help_panel=EXAMINING)(config)
app.command(rich_help_panel=ASKING)(status)
app.command(rich_help_panel=ASKING)(generate)
app.command(rich_help_panel=ASKING)(validate)
app.command(rich_help_panel=ASKING)(chat_check)
app.command(rich_help_panel=ASKING)(deploy)
app.command(rich_help_panel=ASKING)(undeploy)
app.add_typer(round_app, name="round", rich_help_panel=ASKING)
app.command(rich_help_panel=ALONE)(compute)
app.command(rich_help_panel=ALONE)(calibrate)
app.command(rich_help_panel=ALONE)(bench)
app.command(rich_help_panel=ALONE)(report)

if __name__ == "__main__":
    app()
