"""`proofline compute`: computes proofs in this process, without API, Redis or queue."""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli import options
from cli.ask.scheme_params import named_value
from cli.engine_options import takes_engine_options
from cli.grouped import grouped
from cli.nonce_list import parse_nonces
from cli.terminal import UsageError, check_output, note, progress_bar, write_json
from lab.local_engine import clean_stdout, compute_in_steps, local_engine, progress_title
from lab.tables import print_json
from poc_core.records import ProofSpec
from poc_core.schemes import scheme_names
from poc_core.schemes.contract import contract_of

if TYPE_CHECKING:
    from poc_core.records import ProofSpec
    from poc_core.schemes.contract import Pair
    from workers.engines.base import Engine
    from workers.engines.options import EngineOptions

    SchemeName = str
else:
    SchemeName = Literal[tuple(scheme_names())]


@takes_engine_options(for_proofs=True)
@grouped
def compute(
    *,
    block_hash: options.BlockHash,
    public_key: options.PublicKey,
    nonces: options.Nonces,
    engine_options: "EngineOptions",
    proof: options.Proof,
    randomization: Annotated[
        options.Randomization,
        typer.Option(help="Distances: kind of randomization between nonces."),
    ] = options.Randomization.SIGN_FLIPS,
    scheme_option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="An option of a scheme that has no flag here; repeatable.",
        ),
    ] = None,
    scheme: Annotated[
        SchemeName,
        typer.Option(
            help="artifact: a vector of k_dim numbers per nonce; decode: the network's next "
            "scheme, a chain of points per nonce; distance: the earlier scheme, a distance "
            "per nonce."
        ),
    ] = "artifact",
    json_only: options.JsonOnly = False,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> None:
    """Compute proofs in this process, without a queue, and print them.

    With --json stdout holds only {"artifacts": [...], "encoding": {...}} or, for distances,
    {"nonces": [...], "dist": [...]}, with the inputs under "request" as `proofline validate` and
    `proofline report` read them. Nonces without a finite state are left out. The engine's log goes
    to a file, whose path is printed.

    **Example:** proofline compute --model tiny-qwen3 --block-hash 0xab --public-key me --nonces 0-9
    """
    check_output(output)
    wanted = parse_nonces(nonces)
    if not block_hash or not public_key:
        raise UsageError("--block-hash and --public-key must not be empty.")
    known = contract_of(scheme).options.model_fields
    flags = proof._asdict() | {"randomization": randomization.value}
    given = {name: flag for name, flag in flags.items() if name in known and flag is not None}
    given |= dict(named_value(text, "--option") for text in scheme_option or [])
    if "max_tokens" in known and "max_tokens" not in given:
        raise UsageError(f"--scheme {scheme} needs --max-tokens, the steps after the prefill.")
    spec = ProofSpec(
        scheme=scheme,
        block_hash=block_hash,
        public_key=public_key,
        seq_len=proof.seq_len,
        options=given,
    )
    with clean_stdout(verbose) as stdout:
        with local_engine(engine_options) as loaded:
            values = compute_with_progress(loaded, spec, wanted)
        write_result(spec, computed(wanted, values), stdout, json_only, output)


def compute_with_progress(engine: "Engine", spec: ProofSpec, nonces: Sequence[int]) -> list[Any]:
    """Computes the proof value of each nonce, in order, and shows a progress bar. A value is None
    if it cannot be computed.
    """
    values: list[Any] = []
    with progress_bar("nonces") as bar:
        task = bar.add_task(progress_title(engine), total=len(nonces))
        for step in compute_in_steps(engine, spec, nonces):
            values += step
            bar.update(task, completed=len(values))
    return values


def computed(nonces: Sequence[int], values: Sequence[Any]) -> list["Pair"]:
    """Returns (nonce, value) pairs. Leaves out nonces whose value is None, and reports their number
    on stderr.
    """
    pairs = [
        (nonce, value) for nonce, value in zip(nonces, values, strict=True) if value is not None
    ]
    if len(pairs) < len(nonces):
        note(f"{len(nonces) - len(pairs)} nonces gave no finite state and are left out.")
    return pairs


def request_of(spec: ProofSpec) -> dict[str, Any]:
    """Returns the proof's inputs in the form in which `generate` stores them under "request".

    The model is left out, because nodes have different names for it.
    """
    options = dict(spec.options)
    stronger_rng = options.pop("stronger_rng", False)
    params = {"scheme": spec.scheme, "seq_len": spec.seq_len, **options}
    named = {"block_hash": spec.block_hash, "public_key": spec.public_key}
    return named | {"params": params, "poc_stronger_rng": stronger_rng}


def write_result(
    spec: ProofSpec,
    pairs: Sequence["Pair"],
    stdout: IO[str],
    json_only: bool,
    output: Path | None,
) -> None:
    """Writes the proofs: as JSON to the file `output`, as JSON to `stdout` with `json_only`, or
    else as a table to `stdout`.
    """
    contract = contract_of(spec.scheme)
    document = contract.values(pairs) | contract.about(spec, {}) | {"request": request_of(spec)}
    if output is not None:
        write_json(document, output)
    elif json_only:
        print_json(stdout, document)
    else:
        stdout.write(f"{'nonce':>19}  {contract.column}\n")
        stdout.writelines(f"{nonce:>19}  {contract.cell(value)}\n" for nonce, value in pairs)
        stdout.flush()
