"""Looks for a mistake in a proof's inputs that explains why artifacts mismatch."""

from collections.abc import Iterator, Sequence
from typing import Any

from proofline.client import ApiError, Client, Document, JobFailedError

PROBES = 4  # nonces per mistake: enough, because unrelated vectors do not agree by chance
_USUAL_LENGTHS = (64, 128, 256, 512, 1024, 2048)
_REFUSED = (409, 422)  # such as a seq_len that the model does not take


def fitting(client: Client, body: dict[str, Any], mismatches: Sequence[int]) -> list[str]:
    """Returns descriptions of the common input mistakes that explain the mismatches.

    `body`: the request body of the first validation. `mismatches`: the mismatching nonces. Up to
    PROBES of them are validated again, once with each mistake in the inputs. A mistake is an
    explanation if all these nonces then match.
    """
    probes = set(mismatches[:PROBES])
    claims = [one for one in body["validation"]["artifacts"] if one["nonce"] in probes]
    small = body | {"nonces": sorted(probes), "validation": {"artifacts": claims}}
    return [said for said, changed in mistakes(small) if _agrees(client, changed)]


def mistakes(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (description, `body` with that mistake) for each common mistake in the inputs."""
    stronger = not body["poc_stronger_rng"]
    yield f"poc_stronger_rng {str(stronger).lower()}", body | {"poc_stronger_rng": stronger}
    for seq_len in _USUAL_LENGTHS:
        if seq_len != body["params"]["seq_len"]:
            params = body["params"] | {"seq_len": seq_len}
            yield f"seq_len {seq_len}", body | {"params": params}
    for name in ("block_hash", "public_key"):
        for spelling in _other_spellings(body[name]):
            yield f"{name} {spelling}", body | {name: spelling}
    yield (
        "block_hash and public_key exchanged",
        body | {"block_hash": body["public_key"], "public_key": body["block_hash"]},
    )


def _other_spellings(text: str) -> list[str]:
    """Returns other spellings of `text`, likeliest first, such as without 0x or in upper case."""
    bare = text.removeprefix("0x").removeprefix("0X")
    other = [bare, f"0x{bare}", text.upper(), text.lower(), bare.upper(), bare.lower()]
    return [one for one in dict.fromkeys([*other, text.strip()]) if one and one != text]


def _agrees(client: Client, body: dict[str, Any]) -> bool:
    try:
        return bool(client.run(body, Document)["n_mismatch"] == 0)
    except ApiError as error:
        if error.status in _REFUSED:
            return False
        raise
    except JobFailedError:  # such as no finite state with this seq_len
        return False
