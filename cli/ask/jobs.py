"""Builds request bodies of jobs, and waits for their results."""

from typing import Any

from cli.options import Proof
from cli.terminal import note, progress_bar
from proofline.client import Client, Document
from proofline.client.calls import job_path


def place_of(block_hash: str, block_height: int, public_key: str) -> dict[str, Any]:
    """Returns the fields of a job's body that identify the block and the node."""
    return {
        "block_hash": block_hash,
        "block_height": block_height,
        "public_key": public_key,
        # Without effect, because a job names its nonces.
        "node_id": 0,
        "node_count": 1,
    }


def job_body(
    *,
    model: str,
    block_hash: str,
    public_key: str,
    block_height: int,
    nonces: list[int],
    proof: Proof,
    batch_size: int | None,
) -> dict[str, Any]:
    """Returns the body of POST /generate (protocol.md, sections 5 and 8)."""
    body = {**place_of(block_hash, block_height, public_key), "nonces": nonces}
    sizes = {} if batch_size is None else {"batch_size": batch_size}
    return body | proof_fields(model, proof) | sizes


def proof_fields(model: str, proof: Proof) -> dict[str, Any]:
    """Returns the fields of a job's or round's body that only artifacts and decode proofs have."""
    params = {"model": model, "seq_len": proof.seq_len, "k_dim": proof.k_dim}
    if proof.max_tokens is not None:
        params |= {"decode": True, "max_tokens": proof.max_tokens}
    return {"params": params, "poc_stronger_rng": proof.stronger_rng}


def await_job(
    client: Client, request_id: str, title: str, n_nonces: int | None, how_to_resume: str = ""
) -> Document:
    """Waits for a job's result, with a progress bar. Ctrl-C prints the text `how_to_resume`."""
    resume = how_to_resume or f"proofline generate --url {client.base} --request-id {request_id}"
    try:
        with progress_bar("nonces") as bar:
            task = bar.add_task(title, total=n_nonces)
            return client.wait(
                request_id,
                Document,
                lambda done, total: bar.update(task, completed=done, total=total),
            )
    except KeyboardInterrupt:
        note(
            f"No longer waiting; job {request_id} continues. Fetch its result within minutes of its"
            " end:"
        )
        note(f"  {resume}")
        note(f"  curl {client.base}{job_path(request_id)}")
        raise
