"""Command-line options that several commands share, so that names and help texts are the same."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

DEFAULT_PORT = 8000
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
# a copy of poc_core.settings' value, because that module takes long to import
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
# used by the network, and by a distance round without a seq_len (protocol.md, section 5)
DEFAULT_SEQ_LEN = 256
DEFAULT_K_DIM = 12


class Randomization(StrEnum):
    SIGN_FLIPS = "sign_flips"
    LAYER_HOOKS = "layer_hooks"


NONCES_HELP = "Numbers and inclusive ranges of nonces, such as 0,1,2 or 0-99 or 5,10-19."
BLOCK_HASH_HELP = "Hash of the block to prove; any text that is not empty."
PUBLIC_KEY_HELP = "Public key of the proving node; any text that is not empty."
SEQ_LEN_HELP = "Number of tokens in a nonce's input."
K_DIM_HELP = "Number of values in an artifact, at most the model's hidden size."
STRONGER_RNG_HELP = (
    "Seed the inputs with the complete digest (poc_stronger_rng) instead of its first 4 bytes."
)
MAX_TOKENS_HELP = "Compute decode proofs with this number of steps after the prefill."
OUTPUT_HELP = "Write the JSON to this file instead of stdout."

Url = Annotated[str, typer.Option("--url", help="URL of the API.", envvar="PROOFLINE_URL")]
Ports = Annotated[
    list[int] | None,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        envvar="POC_API_PORT",
        help="TCP port of the API; 0 for a free port. Repeatable: the API serves each port.",
        show_default=str(DEFAULT_PORT),
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", help="Print the logs of all processes. Default: write them to files."
    ),
]
JsonOnly = Annotated[
    bool,
    typer.Option("--json", help="Print only the result to stdout, as one line of JSON."),
]
BlockHash = Annotated[str, typer.Option(help=BLOCK_HASH_HELP)]
PublicKey = Annotated[str, typer.Option(help=PUBLIC_KEY_HELP)]
SeqLen = Annotated[int, typer.Option(min=1, help=SEQ_LEN_HELP)]
StrongerRng = Annotated[bool, typer.Option("--stronger-rng", help=STRONGER_RNG_HELP)]
Nonces = Annotated[str, typer.Option("--nonces", help=NONCES_HELP)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help=OUTPUT_HELP)]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=1, help=MAX_TOKENS_HELP)]
ServedModel = Annotated[
    str | None,
    typer.Option("--model", help="Served name of the model. Default: the only model served."),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size", min=1, help="Nonces per task. Default: the API's POC_BATCH_SIZE_DEFAULT."
    ),
]


class Proof(NamedTuple):
    """Options for computing artifacts and decode proofs."""

    seq_len: SeqLen = DEFAULT_SEQ_LEN
    k_dim: Annotated[int, typer.Option(min=1, help=K_DIM_HELP)] = DEFAULT_K_DIM
    stronger_rng: StrongerRng = False
    max_tokens: MaxTokens = None


def _to_settings(redis_url: str | None) -> str | None:
    """Copies --redis-url to the environment, for the settings of this process and its children."""
    if redis_url is not None:
        os.environ["POC_REDIS_URL"] = redis_url
    return redis_url


RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        callback=_to_settings,
        envvar="POC_REDIS_URL",
        help="The Redis of all processes, redis://HOST:PORT/0 or"
        f" redis+sentinel://H:P,H:P/MASTER/0. Default: {DEFAULT_REDIS_URL}.",
    ),
]
