"""`proofline deploy` and `undeploy`: start a model on all hosts, and stop the model."""

import time
from http import HTTPStatus
from typing import Annotated

import typer

from cli import options
from cli.ask.connection import connect
from cli.ask.round_view import in_words
from cli.model_choice import as_on_hosts, check_can_be_found
from cli.shipped import check_spelling
from cli.terminal import UsageError, note
from poc_core.errors import ProoflineError
from proofline.client import ApiError, Client, UpStatus, calls

POLL_S = 0.5
SAY_AGAIN_S = 30.0  # seconds between two messages while a model loads


class DeployError(ProoflineError):
    """The node cannot serve the requested model."""


def deploy(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model on the Hugging Face hub, a shipped model, or a directory that exists "
            "on every host."
        ),
    ] = None,
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM_ARGS", help="After --: arguments of `vllm serve`."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Number format of the weights: auto, float32, bfloat16 or float16.")
    ] = "auto",
    status: Annotated[
        bool, typer.Option("--status", help="Deploy nothing; show the deployment of each host.")
    ] = False,
    url: options.Url = options.DEFAULT_URL,
) -> None:
    """Deploy another model on all hosts, and wait until the model serves.

    The current model and its round end first: computed artifacts are still delivered, jobs are
    cancelled, and running chat has 20 s to end. The current model keeps running if the hub does not
    know the new model, or if the hub is unreachable and the new model is not in the cache. Ctrl-C
    ends this command, and the deployment goes on.

    **Example:** proofline deploy Qwen/Qwen3-8B -- --tensor-parallel-size 2 --max-model-len 32768
    """
    if status is (model is not None):
        raise UsageError("Name a model to deploy, or give --status to see what is deployed.")
    if vllm_args and not vllm_args[0].startswith("-"):
        raise UsageError(
            f"{vllm_args[0]!r} is not an option; arguments of `vllm serve` go to the end, after --."
        )
    if model is not None:
        check_spelling(model)
        model = as_on_hosts(model)
    with connect(url) as client:
        if model is None:
            show(client.deployment())
            return
        # The request comes first, so that a refused deployment ends nothing.
        try:
            client.deploy(model, dtype, vllm_args or [])
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            if any(worker.engine != "synthetic" for worker in client.status().workers):
                check_before_the_end(client, model, vllm_args or [])
            note("Ending what is deployed.")
            client.undeploy()
            client.deploy(model, dtype, vllm_args or [])
        note(f"{model} is deployed; its workers start.")
        wait_served(client)


def check_before_the_end(client: Client, model: str, vllm_args: list[str]) -> None:
    """Raises ProoflineError, before the current model is stopped, if `model` cannot be found."""
    try:
        check_can_be_found(model, vllm_args)
    except ProoflineError as error:
        if is_on_node(client, model):
            return
        raise type(error)(
            f"{error} The current model keeps running. If the hosts have {model}, or can download"
            " it with their own HF_TOKEN, run `proofline undeploy` first."
        ) from None


def is_on_node(client: Client, model: str) -> bool:
    """Returns True if the node serves `model`, or if the API's model cache contains `model`."""
    found = client.deployment()
    if found.is_running and found.model == model:
        return True
    try:
        on_disk = client.call(calls.model_on_disk(model.partition(":")[0]))
    except ApiError:  # not a repository's name, or the key is not allowed to ask
        return False
    return bool(on_disk["status"] != "NOT_FOUND")


def undeploy(url: options.Url = options.DEFAULT_URL) -> None:
    """Stop the round and all workers. Hosts then wait for `proofline deploy`."""
    with connect(url) as client:
        client.undeploy()
    note("Nothing is deployed.")


def wait_served(client: Client) -> None:
    """Waits until the deployed model is served. Raises DeployError if it cannot be served."""
    said_at = time.monotonic()
    while True:
        found = client.deployment()
        if found.status == "running":
            show(found)
            return
        if found.status == "failed":
            raise DeployError(f"{found.model} cannot be served: {found.error}")
        if found.status == "idle":
            raise DeployError("Somebody has stopped the node meanwhile.")
        if time.monotonic() - said_at > SAY_AGAIN_S:
            said_at = time.monotonic()
            show(found)
        time.sleep(POLL_S)


def show(found: UpStatus) -> None:
    what = f"{found.model}: " if found.model else ""
    how = in_words(found.status, found.elapsed_seconds)
    typer.echo(f"{what}{how}{': ' + found.error if found.error else ''}")
    for told in found.left_out:
        typer.echo(f"  left out {told}")
    for host in found.hosts:
        serves = (
            f" {host.model}, {host.ready} of {host.workers} workers ready" if host.model else ""
        )
        typer.echo(f"  {host.host}: {host.state}{serves}{': ' + host.error if host.error else ''}")
        for told in host.left_out:
            typer.echo(f"  {host.host}: left out {told}")
