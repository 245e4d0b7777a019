"""The bodies that clients send (protocol.md, section 5)."""

from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, Strict, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from api.errors import malformed_body
from poc_core.nonces import MAX_NONCE
from poc_core.records import StatTest
from poc_core.settings import MAX_BATCH_SIZE

# Longest name, hash or key. The network's are below 130 characters.
_MAX_TEXT = 256
_MAX_URL = 2048

# Commas a body may hold per nonce that may wait. A nonce with an artifact to validate takes 3. Parsing takes
# memory per item, so a body of nothing but short items would otherwise take 30 times its size.
_MAX_COMMAS_PER_NONCE = 4
_MAX_COMMAS_BESIDE = 1000


def _distinct(nonces: list[int]) -> list[int]:
    if len(set(nonces)) < len(nonces):
        seen: set[int] = set()
        twice = next(nonce for nonce in nonces if nonce in seen or seen.add(nonce))  # type: ignore[func-returns-value]
        raise PydanticCustomError(
            "duplicate_nonces", "Nonce {nonce} is listed twice; list each nonce once", {"nonce": twice}
        )
    return nonces


def _http_url(url: str | None) -> str | None:
    if not url:  # clients that leave it empty mean: no callback
        return None
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and not any(char.isspace() or not char.isprintable() for char in url)
    except ValueError:  # a bad port or bracket
        usable = False
    if not usable:
        raise PydanticCustomError("url", "The url must look like http://host:port/path or https://host/path")
    return url


Text = Annotated[str, Field(min_length=1, max_length=_MAX_TEXT)]
Count = Annotated[int, Strict(), Field(le=MAX_NONCE)]
Nonce = Annotated[int, Strict(), Field(ge=0, le=MAX_NONCE)]
Nonces = Annotated[list[Nonce], FailFast(), AfterValidator(_distinct)]
HttpUrl = Annotated[str | None, Field(max_length=_MAX_URL), AfterValidator(_http_url)]


class ArtifactParams(BaseModel):
    """What the artifacts are computed with; a field that is not listed here is refused."""

    model_config = ConfigDict(extra="forbid")

    model: Text = Field(description="The model's name as the workers serve it.", examples=["tiny-qwen3"])
    seq_len: Count = Field(ge=1, description="Positions of a nonce's prefill.", examples=[256])
    k_dim: Count = Field(12, ge=1, description="Numbers per vector, at most the model's hidden size.")


class Artifact(TypedDict):
    """A nonce's vector: k_dim float16 numbers, little-endian, in base64."""

    # A dict and not a model: a request brings up to 100,000 of them.
    nonce: Nonce
    vector_b64: str


class Validation(BaseModel):
    """Artifacts to be checked, one for each of the request's nonces."""

    artifacts: Annotated[list[Artifact], FailFast()]


class GenerateBody(BaseModel):
    """A request to compute the artifacts of given nonces or, with `validation`, to check somebody's artifacts
    for them.

    Unknown fields are ignored, but for those in `params`.
    """

    block_hash: Text = Field(description="Seeds the layers' reflections and, with public_key, the inputs.")
    block_height: Count = Field(ge=0, description="Handed back in callbacks.")
    public_key: Text = Field(description="Whose proofs these are.")
    # Not held against each other, unlike a round's: the nonces are given, and validators pass on others'
    # node_id.
    node_id: Count = Field(ge=0, description="Handed back in callbacks.")
    node_count: Count = Field(ge=1, description="Nodes that share the nonces.")
    nonces: Nonces = Field(min_length=1, description="The nonces to compute, each once.")
    params: ArtifactParams
    batch_size: Count | None = Field(
        None,
        ge=1,
        le=MAX_BATCH_SIZE,
        description="Nonces per task; POC_BATCH_SIZE_DEFAULT where absent. A worker that can hold fewer gets fewer.",
    )
    wait: bool = Field(False, description="True: the answer is the result. False: a request_id to ask for it.")
    url: HttpUrl = Field(None, description="Where the result is sent as well: to {url}/generated or {url}/validated.")
    validation: Validation | None = Field(None, description="Artifacts to check instead of computing new ones.")
    stat_test: StatTest | None = Field(None, description="When a validation calls the artifacts a fraud.")
    poc_stronger_rng: bool = Field(False, description="Inputs from eight seeds per nonce instead of one.")


Body = TypeVar("Body", bound=BaseModel)


async def whole_body(request: Request) -> bytes:
    """The request's body; unlike that of request.body() it does not live as long as the request, which may wait."""
    return b"".join([chunk async for chunk in request.stream()])


def parse_body(raw: bytes, max_nonces: int, model: type[Body]) -> Body:
    """The JSON as `model`. HTTPException 422 says what is wrong with it, 413 that it has too many items.

    Straight from the bytes: 10 MB of JSON do not become Python objects twice.
    """
    if raw.count(b",") > _MAX_COMMAS_PER_NONCE * max_nonces + _MAX_COMMAS_BESIDE:
        raise HTTPException(413, f"The body has far more items than {max_nonces} nonces need; split the request.")
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise malformed_body(error) from None
