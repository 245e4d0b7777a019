"""`proofline generate`: computes artifacts on a running API."""

from typing import Annotated, Any

import typer

from cli import options, terminal
from cli.ask.connection import connect, only_model
from cli.ask.jobs import await_job, job_body, place_of
from cli.ask.scheme_params import OfScheme, flags_of_artifacts, job_of
from cli.grouped import grouped
from cli.nonce_list import parse_nonces

FOR_A_NEW_JOB = "Required without --request-id."


@grouped
def generate(
    *,
    block_hash: Annotated[
        str | None,
        typer.Option(help=f"{options.BLOCK_HASH_HELP} {FOR_A_NEW_JOB}", show_default=False),
    ] = None,
    public_key: Annotated[
        str | None,
        typer.Option(help=f"{options.PUBLIC_KEY_HELP} {FOR_A_NEW_JOB}", show_default=False),
    ] = None,
    nonces: Annotated[
        str | None, typer.Option(help=f"{options.NONCES_HELP} {FOR_A_NEW_JOB}")
    ] = None,
    block_height: Annotated[
        int, typer.Option(min=0, help="Height of the block; only sent with callbacks.")
    ] = 0,
    proof: options.Proof,
    of_scheme: OfScheme,
    model: options.ServedModel = None,
    batch_size: options.BatchSize = None,
    url: options.Url = options.DEFAULT_URL,
    output: options.Output = None,
    request_id: Annotated[
        str | None, typer.Option(help="Wait for this earlier job instead of submitting one.")
    ] = None,
) -> None:
    """Compute artifacts on a running API, wait for them and print them as JSON.

    Prints the API's answer, {"artifacts": [...], "encoding": {...}, ...}, and adds the inputs under
    "request", so that `proofline validate FILE` needs no further options. Ctrl-C stops this
    command, not the job. --max-tokens computes decode proofs, the network's next scheme. --scheme
    and --param select any scheme by name.

    **Example:** proofline generate --block-hash 0xabc --public-key node-1 --nonces 0-99 -o
    proof.json
    """
    terminal.check_output(output)
    by_name = of_scheme.refuse_flags(flags_of_artifacts(proof))
    with connect(url) as client:
        request: dict[str, Any] | None = None
        n_nonces = None
        if request_id is None:
            given = {"--block-hash": block_hash, "--public-key": public_key, "--nonces": nonces}
            missing = [name for name, value in given.items() if value is None]
            if block_hash is None or public_key is None or nonces is None:
                raise terminal.UsageError(
                    f"Give {' and '.join(missing)}, or --request-id of a job to wait for."
                )
            wanted = parse_nonces(nonces)
            n_nonces = len(wanted)
            served = model or only_model(client)
            if by_name:
                body = job_of(
                    of_scheme,
                    place_of(block_hash, block_height, public_key) | {"nonces": wanted},
                    model=served,
                    seq_len=proof.seq_len,
                    batch_size=batch_size,
                )
            else:
                body = job_body(
                    model=served,
                    block_hash=block_hash,
                    public_key=public_key,
                    block_height=block_height,
                    nonces=wanted,
                    batch_size=batch_size,
                    proof=proof,
                )
            request_id = client.submit(body)
            request = {name: value for name, value in body.items() if name != "nonces"}
        result = await_job(client, request_id, "Generating", n_nonces)
    terminal.write_json(result if request is None else {**result, "request": request}, output)
    excluded = result.get("n_excluded") or (
        n_nonces - len(result["artifacts"]) if n_nonces is not None else 0
    )
    if excluded:
        terminal.note(f"{excluded} nonces gave no finite state and are left out.")
