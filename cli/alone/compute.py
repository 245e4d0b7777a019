"""`proofline compute`: a proof in this process, without API, Redis or queue."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from cli import options
from cli.alone.local_engine import compute_in_steps, local_engine, progress_title, stdout_kept_clean
from cli.console import UsageError, check_output, note, progress_bar
from cli.engine_options import takes_engine_options

if TYPE_CHECKING:
    from poc_core.records import ProofSpec
    from workers.engines.base import Engine
    from workers.engines.options import EngineOptions


class ProofScheme(StrEnum):
    ARTIFACT = "artifact"
    DISTANCE = "distance"


@takes_engine_options(for_proofs=True)
def compute(
    block_hash: Annotated[str, typer.Option("--block-hash", help=options.BLOCK_HASH_HELP)],
    public_key: Annotated[str, typer.Option("--public-key", help=options.PUBLIC_KEY_HELP)],
    nonces: options.Nonces,
    engine_options: "EngineOptions",
    seq_len: Annotated[int, typer.Option(min=1, help=options.SEQ_LEN_HELP)] = options.DEFAULT_SEQ_LEN,
    k_dim: Annotated[int, typer.Option(min=1, help=f"{options.K_DIM_HELP} artifact only.")] = options.DEFAULT_K_DIM,
    stronger_rng: Annotated[
        bool, typer.Option("--stronger-rng", help=f"{options.STRONGER_RNG_HELP} artifact only.")
    ] = False,
    scheme: Annotated[
        ProofScheme,
        typer.Option(help="artifact: vectors of k_dim numbers; distance: the earlier scheme, a distance per nonce."),
    ] = ProofScheme.ARTIFACT,
    randomization: Annotated[
        options.Randomization, typer.Option(help="What varies a distance from nonce to nonce. distance only.")
    ] = options.Randomization.SIGN_FLIPS,
    json_only: Annotated[
        bool, typer.Option("--json", help="Print nothing but the result to stdout, as JSON on one line.")
    ] = False,
    output: options.Output = None,
) -> None:
    """Compute proofs in this process, without a queue, and print them.

    With --json stdout holds only {"artifacts": [...], "encoding": {...}} or, for distances,
    {"nonces": [...], "dist": [...]}; logs go to stderr. Nonces for which the model gave no finite state are left out.

    **Example:** proofline compute --model tiny-qwen3 --block-hash 0xab --public-key me --nonces 0-9 --json
    """
    from cli.nonce_list import parse_nonces
    from poc_core.records import ProofSpec

    check_output(output)
    wanted = parse_nonces(nonces)
    if not block_hash or not public_key:
        raise UsageError("--block-hash and --public-key must not be empty.")
    artifact = scheme is ProofScheme.ARTIFACT
    spec = ProofSpec(
        scheme=scheme.value,
        block_hash=block_hash,
        public_key=public_key,
        seq_len=seq_len,
        options={"k_dim": k_dim, "stronger_rng": stronger_rng} if artifact else {"randomization": randomization.value},
    )
    with stdout_kept_clean() as stdout:
        with local_engine(engine_options) as loaded:
            values = compute_with_progress(loaded, spec, wanted)
        write_result(result_of(spec, wanted, values), stdout, json_only, output)


def compute_with_progress(engine: "Engine", spec: "ProofSpec", nonces: Sequence[int]) -> list[Any]:
    """One value per nonce, in order."""
    values: list[Any] = []
    with progress_bar("nonces") as bar:
        task = bar.add_task(progress_title(engine), total=len(nonces))
        for step in compute_in_steps(engine, spec, nonces):
            values += step
            bar.update(task, completed=len(values))
    return values


def result_of(spec: "ProofSpec", nonces: Sequence[int], values: Sequence[Any]) -> dict[str, Any]:
    """The document to print; nonces without a value are left out, with a note on stderr."""
    found = [(nonce, value) for nonce, value in zip(nonces, values, strict=True) if value is not None]
    if len(found) < len(nonces):
        note(f"{len(nonces) - len(found)} nonces gave no finite state and are left out.")
    if spec.scheme == "artifact":
        return {
            "artifacts": [{"nonce": nonce, "vector_b64": value} for nonce, value in found],
            "encoding": {"dtype": "f16", "k_dim": spec.options["k_dim"], "endian": "le"},
        }
    return {"nonces": [nonce for nonce, _ in found], "dist": [value for _, value in found]}


def write_result(document: dict[str, Any], stdout: IO[str], json_only: bool, output: Path | None) -> None:
    """JSON to a file or to stdout, or else a table for people."""
    import json

    from cli.console import write_json

    if output is not None:
        write_json(document, output)
        return
    if json_only:
        stdout.write(json.dumps(document, separators=(",", ":")) + "\n")
    else:
        for row in table_rows(document):
            stdout.write("  ".join(row) + "\n")
    stdout.flush()


def table_rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "artifacts" in document:
        yield f"{'nonce':>19}", "vector_b64"
        for item in document["artifacts"]:
            yield f"{item['nonce']:>19}", item["vector_b64"]
    else:
        yield f"{'nonce':>19}", "distance"
        for nonce, dist in zip(document["nonces"], document["dist"], strict=True):
            yield f"{nonce:>19}", f"{dist:.6f}"
