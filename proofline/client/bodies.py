"""The API's bodies, with defaults for the node's place among other nodes (node_id of node_count).

The API itself has no defaults, because a node with a wrong place would compute another node's
nonces.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from poc_core.fields import Count
from poc_core.schemes.artifact import requests as artifact
from poc_core.schemes.decode import requests as decode

Body = BaseModel | Mapping[str, Any]


class Place(BaseModel):
    """The block height, and the node's place. By default the node is the only node."""

    block_height: Count = 0
    node_id: Count = 0
    node_count: Count = 1


class GenerateBody(Place, artifact.GenerateBody):
    """The body of a job for artifacts. `params` is ArtifactParams, `nonces` a list of integers."""


class ArtifactRoundBody(Place, artifact.ArtifactRoundBody):
    """The body of a round for artifacts, sent to {url}/generated. `params` is ArtifactParams."""


class DecodeBody(Place, decode.DecodeBody):
    """The body of a job for chains. `params` is DecodeParams, `nonces` a list of integers."""


def as_json(body: Body | None) -> Any:
    """Returns a body's JSON with the fields that were set; the API has defaults for the others."""
    return body.model_dump(mode="json", exclude_unset=True) if isinstance(body, BaseModel) else body


def placed(body: Body) -> dict[str, Any]:
    """Returns the JSON of a job's or round's body, with the default for a missing place."""
    return {**Place().model_dump(), **as_json(body)}
