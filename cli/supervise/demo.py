"""`proofline demo`: shows a proof, from the request to the verdict, with a tiny model."""

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cli.ask.connection import connect
from cli.ask.jobs import await_job, job_body
from cli.options import Proof
from cli.supervise.foreground import interrupted_by
from cli.supervise.stack import Stack
from cli.terminal import note, stderr_console
from poc_core.errors import ProoflineError
from proofline.client import Client
from workers.engines.options import EngineKind, EngineOptions

MODEL = "tiny-qwen3"
N_NONCES = 256
SEQ_LEN = 64  # a quarter of the protocol's: seconds on a few slow cores
# Thresholds for an engine that checks its own artifacts. Two machines need the network's terms.
TERMS = {"dist_threshold": 0.02, "p_mismatch": 0.001, "fraud_threshold": 0.01}
TAMPERED_EVERY = 16  # every 16th vector is replaced in the copy that must be detected
BLOCK_HASH = "proofline-demo"
PUBLIC_KEY = "demo-node"
READY_TIMEOUT_S = 600.0  # the first start compiles kernels, which takes minutes on a slow machine


class DemoError(ProoflineError):
    """A step of the demo failed, or gave an unexpected verdict."""


def demo(
    engine: Annotated[
        EngineKind, typer.Option(help="The engine; synthetic returns placeholder vectors.")
    ] = "vllm",
) -> None:
    """Start the stack with a tiny model, compute and validate 256 artifacts, detect a forgery, and
    stop.

    Takes about 40 s on 2 idle cores. Needs no GPU, no network and no running Redis.
    """
    if engine != "synthetic":
        check_installed(engine)
    began = time.monotonic()
    crashes: list[str] = []

    def announce(message: str) -> None:
        crashes.append(message)
        note(f"demo: {message}")

    stack = Stack(EngineOptions(model=MODEL, engine=engine), max_fast_crashes=0, announce=announce)
    note(f"Starting Redis, the API and one {engine} worker with {MODEL}.")
    with interrupted_by(signal.SIGTERM, signal.SIGHUP), stack:
        with stderr_console().status("Loading the engine, 20 to 40 s on a CPU"):
            stack.wait_ready(READY_TIMEOUT_S)
        rows = [("start of the stack", f"{time.monotonic() - began:.1f} s")]
        try:
            rows += prove(stack)
        except ProoflineError as error:
            tail = "\n  ".join(["The end of the worker's log:", *stack.worker_log()])
            raise DemoError(f"{error}\n  {tail}") from error
        show(rows)
        note("Stopping.")
    note(
        f"Everything has stopped; the demo took {time.monotonic() - began:.0f} s. Next:"
        f" {command()} up --model {MODEL}"
    )


def command() -> str:
    """Returns the command that starts `proofline` in the caller's shell: a path without a venv."""
    path = sys.argv[0]
    return path if path.endswith("/proofline") and "VIRTUAL_ENV" not in os.environ else "proofline"


def prove(stack: Stack) -> Iterator[tuple[str, str]]:
    """Computes artifacts, validates them and a forged copy, and yields the demo's table rows.

    Raises DemoError unless exactly the forged artifacts mismatch.
    """
    with connect(stack.base_url) as client:
        body = job_body(
            model=stack.model_name,
            nonces=list(range(N_NONCES)),
            proof=Proof(seq_len=SEQ_LEN),
            batch_size=None,
            block_hash=BLOCK_HASH,
            public_key=PUBLIC_KEY,
            block_height=1,
        )
        began = time.monotonic()
        artifacts = run_job(client, body, "Generating")["artifacts"]
        took_s = time.monotonic() - began
        if sorted(item["nonce"] for item in artifacts) != body["nonces"]:
            raise DemoError(f"{len(artifacts)} artifacts came back for {N_NONCES} nonces.")
        yield "artifacts generated", f"{len(artifacts)}"
        yield "nonces/s from the request to its result", f"{N_NONCES / took_s:.0f}"

        body["stat_test"] = TERMS
        honest = run_job(client, {**body, "validation": {"artifacts": artifacts}}, "Validating")
        yield row_of(honest, 0, "honest copy")
        forged = tampered(artifacts)
        verdict = run_job(
            client, {**body, "validation": {"artifacts": forged}}, "Validating a tampered copy"
        )
        n_forged = sum(a != b for a, b in zip(artifacts, forged, strict=True))
        yield row_of(verdict, n_forged, "tampered copy")


def run_job(client: Client, body: dict[str, Any], title: str) -> Any:
    request_id = client.submit(body)
    return await_job(
        client, request_id, title, len(body["nonces"]), "the stack of the demo ends with it"
    )


def tampered(artifacts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a copy in which every TAMPERED_EVERY-th artifact has the next artifact's vector."""
    copy = [dict(item) for item in artifacts]
    for index in range(0, len(copy) - 1, TAMPERED_EVERY):
        copy[index]["vector_b64"] = artifacts[index + 1]["vector_b64"]
    return copy


def row_of(verdict: dict[str, Any], n_mismatch: int, what: str) -> tuple[str, str]:
    """Returns a verdict's table row. Raises DemoError unless exactly `n_mismatch` mismatch."""
    fraud_expected = n_mismatch > 0
    if (verdict["n_mismatch"], verdict["fraud_detected"]) != (n_mismatch, fraud_expected):
        raise DemoError(
            f"The {what} should show {n_mismatch} mismatches and"
            f" {'fraud' if fraud_expected else 'no fraud'}, but the verdict is {verdict}."
        )
    word = "fraud found" if fraud_expected else "no fraud"
    return f"{what}: mismatches, p-value", f"{n_mismatch}, {verdict['p_value']:.3g}: {word}"


def show(rows: Iterable[tuple[str, str]]) -> None:
    terms = ", ".join(f"{name} {term:g}" for name, term in TERMS.items())
    caption = f"Terms of this demo: {terms}. They suit one engine with random weights that checks"
    caption += " its own proofs; other validations use the network's."
    table = Table(title="Proofline demo", caption=caption, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def check_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise DemoError(
            f"The package {package} is not installed here: run `make setup` in the checkout for the"
            " CPU engine, or `make setup-gpu` on a machine with an NVIDIA GPU."
        )
