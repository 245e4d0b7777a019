"""`proofline round`: starts, shows, watches and stops the round of a running API."""

import time
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cli import options
from cli.ask.connection import connect, only_model
from cli.ask.round_view import line, picture
from cli.ask.scheme_params import OfScheme, flags_of_artifacts, round_of
from cli.grouped import grouped
from cli.terminal import UsageError, note, write_json
from poc_core.errors import ProoflineError
from proofline.client import ApiError, Client, Document, calls
from proofline.client.exchange import POLL_PATIENCE_S

RUNNING = ("GENERATING", "VALIDATING")

app = typer.Typer(no_args_is_help=True)


class NoRoundError(ProoflineError):
    """`proofline round watch` was called while no round runs."""


class Share(NamedTuple):
    """Options that determine which nonces this node computes."""

    node_id: Annotated[int, typer.Option(min=0, help="This node, from 0 to NODE_COUNT - 1.")] = 0
    node_count: Annotated[int, typer.Option(min=1, help="Nodes that share the nonces.")] = 1
    group_id: Annotated[
        int, typer.Option(min=0, help="This group of the node's workers, from 0 to N_GROUPS - 1.")
    ] = 0
    n_groups: Annotated[int, typer.Option(min=1, help="Groups that share the node's nonces.")] = 1


class Vectors(NamedTuple):
    """Options for rounds of artifacts or decode proofs."""

    k_dim: Annotated[
        int | None,
        typer.Option(min=1, help=f"{options.K_DIM_HELP} Default: {options.DEFAULT_K_DIM}."),
    ] = None
    stronger_rng: options.StrongerRng = False
    max_tokens: options.MaxTokens = None


class Distances(NamedTuple):
    """Options for rounds of distance proofs."""

    r_target: Annotated[
        float | None,
        typer.Option(
            help="Distances instead of artifacts: nonces below this one, up to 2, are valid."
            " `proofline calibrate` finds one."
        ),
    ] = None
    fraud_threshold: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Of distances: below this probability of honesty a batch is a fraud."
            " Default: 0.01.",
        ),
    ] = None
    layer_hooks: Annotated[
        bool,
        typer.Option(
            "--layer-hooks", help="Of distances: randomize after every layer instead of by signs."
        ),
    ] = False


@app.command()
@grouped
def start(
    *,
    block_hash: options.BlockHash,
    public_key: options.PublicKey,
    block_height: Annotated[
        int, typer.Option(min=0, help="Height of the block; only sent to the receiver.")
    ] = 0,
    callback_url: Annotated[
        str | None,
        typer.Option(
            help="The artifacts are POSTed to CALLBACK_URL/generated. Without it they are only"
            " counted."
        ),
    ] = None,
    share: Share,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Nonces a worker computes at a time, at most. Default: as many as fit, up to the"
            " API's POC_BATCH_SIZE_DEFAULT.",
        ),
    ] = None,
    seq_len: options.SeqLen = options.DEFAULT_SEQ_LEN,
    vectors: Vectors,
    distances: Distances,
    of_scheme: OfScheme,
    model: options.ServedModel = None,
    url: options.Url = options.DEFAULT_URL,
) -> None:
    """Start a round on a running API; the round goes on until `proofline round stop`.

    Node I of N computes the nonces I, I + N, I + 2N, ...; its workers share them, so that each
    nonce is computed once. While a round runs, no other round can be started, and jobs wait for its
    end. --scheme and --param select any scheme by name.

    **Example:** proofline round start --block-hash 0xabc --public-key node-1 --callback-url
    http://127.0.0.1:9100

    **Example:** proofline round start --block-hash 0xabc --public-key node-1 --r-target 1.405
    """
    flags = dict(zip(("--r-target", "--fraud-threshold", "--layer-hooks"), distances, strict=True))
    by_name = of_scheme.refuse_flags(flags_of_artifacts(*vectors) | flags)
    check_scheme(vectors, distances)
    with connect(url) as client:
        body: dict[str, Any] = {
            "block_hash": block_hash,
            "block_height": block_height,
            "public_key": public_key,
            **share._asdict(),
        }
        model = model or only_model(client)
        if by_name:
            body = round_of(
                of_scheme,
                body,
                model=model,
                seq_len=seq_len,
                batch_size=batch_size,
                url=callback_url,
            )
        else:
            body |= body_of(model, seq_len, vectors, distances)
            if batch_size is not None:
                body["batch_size"] = batch_size
            if callback_url is not None:
                body["url" if distances.r_target is None else "callback_url"] = callback_url
        client.start_round(body)
        note(f"The round generates. Look at it with: proofline round watch{_same(url)}")
        if callback_url is None:
            note("Without --callback-url its artifacts are counted and sent to nobody.")


def body_of(model: str, seq_len: int, vectors: Vectors, distances: Distances) -> dict[str, Any]:
    """Returns the fields of a round's request body that depend on the proof scheme."""
    if distances.r_target is None:
        params = {
            "model": model,
            "seq_len": seq_len,
            "k_dim": vectors.k_dim or options.DEFAULT_K_DIM,
        }
        if vectors.max_tokens is not None:
            params |= {"decode": True, "max_tokens": vectors.max_tokens}
        return {"params": params, "poc_stronger_rng": vectors.stronger_rng}
    body = {
        "r_target": distances.r_target,
        "seq_len": seq_len,
        "model": model,
        "use_sign_flips": not distances.layer_hooks,
        "use_layer_hooks": distances.layer_hooks,
    }
    if distances.fraud_threshold is not None:
        body["fraud_threshold"] = distances.fraud_threshold
    return body


def check_scheme(vectors: Vectors, distances: Distances) -> None:
    """Raises UsageError for options of different schemes, or an --r-target out of range."""
    r_target = distances.r_target
    if r_target is None:
        flags = {
            "--fraud-threshold": distances.fraud_threshold,
            "--layer-hooks": distances.layer_hooks,
        }
        why = "is for distances; give --r-target too, or leave it out."
    elif not 0 < r_target <= 2:
        raise UsageError(f"--r-target is a distance above 0, up to 2, not {r_target:g}.")
    else:
        flags = dict(zip(("--k-dim", "--stronger-rng", "--max-tokens"), vectors, strict=True))
        why = "is for artifacts; leave it out, or --r-target."
    if given := [name for name, value in flags.items() if value]:
        raise UsageError(f"{' and '.join(given)} {why}")


@app.command()
def status(
    as_json: Annotated[
        bool, typer.Option("--json", help="The API's answer as one line of JSON instead.")
    ] = False,
    url: options.Url = options.DEFAULT_URL,
) -> None:
    """Show the running or last round: rates, workers, and what is delivered."""
    with connect(url) as client:
        answer = client.call(calls.status(Document))
    if as_json:
        write_json(answer, None)
        return
    Console().print(picture(answer, time.time()))


@app.command()
def stop(url: options.Url = options.DEFAULT_URL) -> None:
    """Stop the round within one micro-batch, and cancel the jobs that wait in the queue.

    Undelivered artifacts are kept, and delivery goes on for POC_CALLBACK_RETENTION_SEC. A job's
    callback is given up if its receiver did not accept it in five consecutive tries.
    """
    with connect(url) as client:
        before = client.status()
        cancelled = client.stop()
    note("The round is stopped." if before.state in RUNNING else "No round was running.")
    if cancelled:
        note(f"{cancelled} jobs are cancelled.")


@app.command()
def watch(
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")
    ] = 1.0,
    url: options.Url = options.DEFAULT_URL,
) -> None:
    """Watch the round until it stops: rates, totals, every worker, the outbox.

    On a terminal the view is redrawn; in a log each update is one line. Ctrl-C ends only the
    watching.
    """
    console = Console()
    with connect(url) as client:
        state = client.status().state
        if state not in RUNNING:
            raise NoRoundError(
                f"No round is running (the node is {state}); start one with `proofline round"
                " start`."
            )
        try:
            last = show(follow(client, interval_s), console)
        except KeyboardInterrupt:
            note(
                "No longer watching; the round continues. Stop it with: proofline round"
                f" stop{_same(url)}"
            )
            return
    waiting = last.get("stats", {}).get("artifacts_waiting")
    note(
        f"The round is {last.get('state')}."
        + (f" {waiting:,} artifacts still wait for delivery." if waiting else "")
    )


def follow(client: Client, interval_s: float) -> Iterator[Document | ApiError]:
    """Yields the round's status every `interval_s` until it ends; an ApiError during an outage.

    Raises the ApiError after POLL_PATIENCE_S of outage, or if retrying cannot help.
    """
    answered = time.monotonic()
    while True:
        try:
            answer = client.call(calls.status(Document), patience_s=0)
        except ApiError as error:
            if not error.is_temporary or time.monotonic() - answered > POLL_PATIENCE_S:
                raise
            yield error
        else:
            answered = time.monotonic()
            yield answer
            if answer.get("state") not in RUNNING:
                return
        time.sleep(interval_s)


def show(looks: Iterator[Document | ApiError], console: Console) -> dict[str, Any]:
    """Prints each status: a terminal shows the newest, a log all. Returns the last status."""
    last: dict[str, Any] = {}
    if not console.is_terminal or console.is_dumb_terminal:
        for look in looks:
            if isinstance(look, dict):
                last = look
            typer.echo(line(look) if isinstance(look, dict) else f"no answer, trying again: {look}")
        return last
    with Live(console=console, auto_refresh=False) as live:
        for look in looks:
            if isinstance(look, dict):
                last = look
                live.update(picture(look, time.time()), refresh=True)
            else:
                away = Text(f"No answer, trying again: {look}", style="bold red")
                live.update(Group(picture(last, time.time()), away), refresh=True)
    return last


def _same(url: str) -> str:
    return "" if url == options.DEFAULT_URL else f" --url {url}"
