"""Parses request bodies into the pydantic models of a proof scheme (protocol.md, section 5)."""

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from typing import Annotated, Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    create_model,
)
from pydantic_core import PydanticCustomError

from api.errors import malformed_body
from poc_core.callbacks import redacted
from poc_core.fields import Text
from poc_core.records import RoundConfig
from poc_core.schemes.contract import Contract, contract_of, contracts, recognised
from poc_core.schemes.requests import BatchBody, JobBody, RoundBody
from poc_core.serving.model_options import Dtype, dtype_of

# Commas allowed in a body for each nonce that can be queued; a nonce with an artifact to validate
# needs 3 commas. Parsing takes memory per item: a body of short items could take 30 times its size.
_MAX_COMMAS_PER_NONCE = 4
_MAX_COMMAS_BESIDE = 1000
# Largest body that starts a round, in bytes; a valid one has no lists and takes less than 3,000.
_MAX_ROUND_BYTES = 64 * 1024

Body = TypeVar("Body", bound=BaseModel)


def _printable(name: str) -> str:
    if not name.isprintable():
        raise PydanticCustomError("name", "A name has no characters that cannot be printed")
    return name


def _dtype(given: Any) -> Any:
    return dtype_of(given) if isinstance(given, str) else given


class DeployBody(BaseModel):
    """The body of POST /api/v1/inference/up: a model to deploy."""

    # A leading dash would be read as an argument.
    model: Annotated[Text, Field(pattern=r"^[^\s-]"), AfterValidator(_printable)] = Field(
        description=(
            "A name on the Hugging Face hub, a shipped model, or a directory on every host."
        ),
        examples=["Qwen/Qwen3-8B"],
    )
    dtype: Annotated[Dtype, BeforeValidator(_dtype)] = Field(
        "auto", description="Number format of the weights."
    )
    additional_args: list[Annotated[str, Field(max_length=8192)]] = Field(
        default=[],
        max_length=200,
        description="Arguments of `vllm serve`, except those that run code, open ports or"
        " read files.",
        examples=[["--tensor-parallel-size", "4", "--max-model-len", "32768"]],
    )


async def whole_body(request: Request) -> bytes:
    """Reads and returns a request's body. Unlike request.body(), keeps no copy in the request."""
    body = BytesIO()
    async for part in request.stream():
        body.write(part)
    return body.getvalue()


def job_bodies() -> dict[str, type[JobBody]]:
    """Returns the pydantic model of POST /generate's body for each scheme, by scheme name."""
    return {contract.name: contract.job_body for contract in contracts() if contract.job_body}


def round_bodies() -> dict[str, type[RoundBody]]:
    """Returns the pydantic model of a body that starts a round for each scheme, by name."""
    return {contract.name: contract.round_body for contract in contracts() if contract.round_body}


def phased_round_bodies() -> dict[str, type[RoundBody]]:
    """Returns the `round_bodies` of those schemes whose rounds can validate (POST /validate)."""
    bodies = batch_bodies()
    return {name: body for name, body in round_bodies().items() if name in bodies}


def batch_bodies() -> dict[str, type[BatchBody]]:
    """Returns the pydantic model of POST /validate's body for each scheme, by scheme name."""
    return {contract.name: contract.batch_body for contract in contracts() if contract.batch_body}


def parse_body(raw: bytes, max_nonces: int, bodies: dict[str, type[Body]]) -> tuple[str, Body]:
    """Parses a body that lists nonces. Returns the scheme's name and the parsed body.

    Raises HTTPException 422 if the body is invalid, 413 if it is too long for `max_nonces` nonces.
    """
    if raw.count(b",") > _MAX_COMMAS_PER_NONCE * max_nonces + _MAX_COMMAS_BESIDE:
        raise HTTPException(
            413, f"The body has far more items than {max_nonces} nonces need; split the request."
        )
    return _parse(raw, bodies)


async def round_body(request: Request, bodies: dict[str, type[RoundBody]]) -> RoundBody:
    """Parses the body that starts or stores a round. Raises HTTPException 413 or 422."""
    raw = await whole_body(request)
    # Checked before parsing: 32 MB of short items would take a gigabyte, and block the event loop.
    if len(raw) > _MAX_ROUND_BYTES:
        raise HTTPException(
            413, f"A body that starts a round has at most {_MAX_ROUND_BYTES} bytes."
        )
    return _parse(raw, bodies)[1]


def _parse(raw: bytes, bodies: dict[str, type[Body]]) -> tuple[str, Body]:
    """Returns a body's scheme and pydantic model. Builds no dict, because a body can have 10 MB."""
    candidates = [contract for contract in contracts() if contract.name in bodies]
    try:
        scheme = recognised(_marks(raw, candidates), candidates).name
        return scheme, bodies[scheme].model_validate_json(raw)
    except ValidationError as error:
        raise malformed_body(error) from None


def _marks(raw: bytes, candidates: Sequence[Contract]) -> dict[str, Any]:
    """Returns the fields of a body that identify its scheme; {} if there is only one scheme."""
    if len(candidates) < 2:
        return {}
    marked = _marks_model(
        tuple(mark for contract in candidates for mark in contract.marks)
    ).model_validate_json(raw)
    return {name: getattr(marked, name) for name in marked.model_fields_set}


@cache
def _marks_model(names: tuple[str, ...]) -> type[BaseModel]:
    fields: dict[str, Any] = dict.fromkeys(names, (Any, None))
    model: type[BaseModel] = create_model("Marks", **fields)
    return model


def config_of(config: RoundConfig) -> dict[str, Any]:
    """Returns a round's configuration in the format of its request's body. Redacts the URL."""
    body = contract_of(config.spec.scheme).round_body
    assert body is not None  # a scheme without round bodies has no rounds
    return body.of(config.model_copy(update={"url": redacted(config.url)}))
