"""`proofline validate`: makes a running API validate artifacts."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from cli import options, terminal
from cli.ask.connection import connect, only_model
from cli.ask.jobs import await_job, job_body
from cli.ask.mistakes import fitting
from cli.grouped import grouped
from cli.nonce_list import parse_nonces
from poc_core.errors import ProoflineError
from poc_core.schemes.decode.options import MARGIN

FROM_FILE = "Default: the file's."
OF_NETWORK = "Default: the network's for the model."
MOST_NAMED = 10  # mismatching nonces that are listed


class OfFile(NamedTuple):
    """Options for a proof's inputs. An input without an option is read from the proof's file."""

    block_hash: Annotated[
        str | None, typer.Option(help=f"{options.BLOCK_HASH_HELP} {FROM_FILE}", show_default=False)
    ] = None
    public_key: Annotated[
        str | None, typer.Option(help=f"{options.PUBLIC_KEY_HELP} {FROM_FILE}", show_default=False)
    ] = None
    block_height: Annotated[
        int | None, typer.Option(min=0, help=f"Height of the block. {FROM_FILE}")
    ] = None
    seq_len: Annotated[
        int | None, typer.Option(min=1, help=f"{options.SEQ_LEN_HELP} {FROM_FILE}")
    ] = None
    k_dim: Annotated[
        int | None,
        typer.Option(min=1, help=f"{options.K_DIM_HELP} {FROM_FILE}"),
    ] = None
    stronger_rng: Annotated[
        bool,
        typer.Option(
            "--stronger-rng", help=f"{options.STRONGER_RNG_HELP} Or --no-stronger-rng. {FROM_FILE}"
        ),
    ] = False
    # A separate hidden option, because both names together would make the column of names too wide.
    no_stronger_rng: Annotated[bool, typer.Option("--no-stronger-rng", hidden=True)] = False
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Decode proofs: number of steps after the prefill. {FROM_FILE}"),
    ] = None


class Judged(NamedTuple):
    """Options for a validation's thresholds: distance, mismatch probability and p-value."""

    dist_threshold: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest distance (L2) at which two vectors count as equal; decode proofs: "
            f"margin of a claimed point. {OF_NETWORK}",
        ),
    ] = None
    p_mismatch: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help=f"Probability that an honest artifact exceeds --dist-threshold. {OF_NETWORK}",
        ),
    ] = None
    fraud_threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1, help=f"p-value below which the verdict is fraud. {OF_NETWORK}"),
    ] = None


@grouped
def validate(
    *,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="JSON file written by `proofline generate` or `compute --json`; - for stdin."
        ),
    ] = None,
    artifacts: Annotated[Path | None, typer.Option(hidden=True)] = None,
    of_file: OfFile,
    nonces: Annotated[
        str | None, typer.Option(help="Validate only these nonces of the file. Default: all.")
    ] = None,
    judged: Judged,
    model: Annotated[
        str | None,
        typer.Option(
            help="Served name of the model. Default: the file's, or the only model served."
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="After mismatches, recompute some artifacts with common mistakes (another "
            "seq_len, poc_stronger_rng, spelling of hash or key), and print the mistake "
            "that explains them.",
        ),
    ] = False,
    batch_size: options.BatchSize = None,
    url: options.Url = options.DEFAULT_URL,
    output: options.Output = None,
) -> None:
    """Let a running API validate the artifacts of a file, and print the verdict as JSON.

    Inputs without an option are taken from the file, in which `proofline generate` noted them under
    "request".

    **Exit code:** 0 no fraud, 3 fraud, 1 the API gave no verdict, 2 wrong options.

    **Example:** proofline validate proof.json
    """
    terminal.check_output(output)
    claimed, noted, noted_k_dim = read_artifacts(the_one(file, artifacts))
    if nonces is not None:
        claimed = only_nonces(claimed, parse_nonces(nonces))
    params = noted.get("params")
    params = params if isinstance(params, dict) else {}
    block_hash = of_file.block_hash if of_file.block_hash is not None else noted.get("block_hash")
    public_key = of_file.public_key if of_file.public_key is not None else noted.get("public_key")
    if block_hash is None or public_key is None:
        raise terminal.UsageError(
            "The file does not say what it was made for; give --block-hash and --public-key."
        )
    is_decode = params.get("decode") or params.get("scheme") == "decode"
    noted_steps = params.get("max_tokens") if is_decode else None
    n_steps = of_file.max_tokens or noted_steps or steps_of(claimed)
    height = of_file.block_height
    said = of_file.stronger_rng or of_file.no_stronger_rng
    proof = options.Proof(
        of_file.seq_len or params.get("seq_len") or options.DEFAULT_SEQ_LEN,
        of_file.k_dim or params.get("k_dim") or noted_k_dim or options.DEFAULT_K_DIM,
        of_file.stronger_rng if said else bool(noted.get("poc_stronger_rng")),
        n_steps,
    )
    with connect(url) as client:
        body = job_body(
            model=model or params.get("model") or only_model(client),
            block_hash=block_hash,
            public_key=public_key,
            block_height=height if height is not None else noted.get("block_height", 0),
            nonces=[item["nonce"] for item in claimed],
            proof=proof,
            batch_size=batch_size,
        )
        body["validation"] = {"artifacts": claimed}
        # `generate` writes the field next to params. `compute` writes it within params.
        if noted.get("per_nonce_reflection") or params.get("per_nonce_reflection"):
            body["per_nonce_reflection"] = True
        named = {name: value for name, value in judged._asdict().items() if value is not None}
        if named and n_steps is not None:
            named.setdefault("dist_threshold", MARGIN)
        if named:
            body["stat_test"] = named
        verdict = await_job(client, client.submit(body), "Validating", len(claimed))
        terminal.write_json(verdict, output)
        terminal.note(describe_verdict(verdict))
        if explain and (wrong := verdict["mismatch_nonces"]):
            try:
                fits = fitting(client, body, wrong)
            except ProoflineError as error:  # changes nothing about the verdict
                terminal.note(f"The mistakes could not all be tried: {error}")
            else:
                none = "None of the tried mistakes explains it."
                terminal.note(f"With {fits[0]} they agree." if fits else none)
    if verdict["fraud_detected"]:
        raise typer.Exit(terminal.EXIT_FRAUD)


def the_one(file: Path | None, artifacts: Path | None) -> Path:
    """Returns the path in FILE or --artifacts. Raises UsageError unless exactly one is given."""
    named = [path for path in (file, artifacts) if path is not None]
    if len(named) != 1:
        raise terminal.UsageError(
            "Name one file, as `proofline generate` wrote it: proofline validate FILE."
        )
    return named[0]


def read_artifacts(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any], int | None]:
    """Returns (artifacts, inputs or {}, k_dim or None) of the file. Raises UsageError."""
    stdin = typer.get_text_stream("stdin") if str(path) == "-" else None
    document = terminal.read_json(path, "give the file that `proofline generate` wrote", stdin)
    if isinstance(document, list):
        document = {"artifacts": document}
    artifacts = document.get("artifacts") if isinstance(document, dict) else None
    if not isinstance(artifacts, list) or not all(is_artifact(item) for item in artifacts):
        raise terminal.UsageError(
            f'{path} holds no artifacts; it must be {{"artifacts": [{{"nonce": 0, "vector_b64":'
            ' "..."}, ...]}.'
        )
    noted = document.get("request")
    encoding = document.get("encoding")
    k_dim = encoding.get("k_dim") if isinstance(encoding, dict) else None
    return artifacts, noted if isinstance(noted, dict) else {}, k_dim


def is_artifact(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("nonce"), int)
        and isinstance(item.get("vector_b64"), str)
    )


def steps_of(artifacts: list[dict[str, Any]]) -> int | None:
    """Returns the most frequent number of decode steps; None if no artifact is a decode proof."""
    lengths = [
        len(points)
        for item in artifacts
        if isinstance(points := item.get("k_points_steps"), list) and points
    ]
    return max(max(set(lengths), key=lengths.count) - 1, 1) if lengths else None


def only_nonces(artifacts: list[dict[str, Any]], nonces: list[int]) -> list[dict[str, Any]]:
    by_nonce = {item["nonce"]: item for item in artifacts}
    missing = [nonce for nonce in nonces if nonce not in by_nonce]
    if missing:
        raise terminal.UsageError(
            f"The file has no artifact of nonce {missing[0]}; leave it out of --nonces."
        )
    return [by_nonce[nonce] for nonce in nonces]


def describe_verdict(verdict: dict[str, Any]) -> str:
    word = "FRAUD" if verdict["fraud_detected"] else "No fraud"
    excluded = (
        f", {verdict['n_excluded']} could not be computed here" if verdict.get("n_excluded") else ""
    )
    lines = [
        f"{word}: {verdict['n_mismatch']} of {verdict['n_total']} artifacts mismatch, "
        f"p-value {verdict['p_value']:.3g}{excluded}."
    ]
    if distances := verdict.get("distances"):
        lines.append(
            f"Distances {distances['min']:.4f} to {distances['max']:.4f}, median"
            f" {distances['median']:.4f}; the threshold is {verdict['dist_threshold']:g}."
        )
    if terms := verdict.get("terms"):
        lines.append(
            f"Terms: dist_threshold {verdict['dist_threshold']:g}, p_mismatch"
            f" {verdict['p_mismatch']:g}, fraud_threshold {verdict['fraud_threshold']:g} ({terms})."
        )
    if wrong := verdict.get("mismatch_nonces"):
        lines.append(f"Nonces that mismatch: {some(wrong)}.")
    if cause := verdict.get("likely_cause"):
        lines.append(f"Likely cause: {cause}")
    return "\n".join(lines)


def some(nonces: list[int]) -> str:
    """Returns a text with the first MOST_NAMED nonces and the number of the remaining nonces."""
    more = f" and {len(nonces) - MOST_NAMED} more" if len(nonces) > MOST_NAMED else ""
    return ", ".join(map(str, nonces[:MOST_NAMED])) + more
