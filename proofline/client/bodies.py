"""Request bodies of the API, with defaults for block_height, node_id and node_count.

The API itself has no defaults for these fields, because a node with a wrong node_id would compute
another node's nonces.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from poc_core.fields import Count
from poc_core.schemes.artifact import requests as artifact
from poc_core.schemes.decode import requests as decode

Body = BaseModel | Mapping[str, Any]


class Place(BaseModel):
    """The fields for block height, node id and number of nodes. By default there is one node."""

    block_height: Count = 0
    node_id: Count = 0
    node_count: Count = 1


class GenerateBody(Place, artifact.GenerateBody):
    """The body of a job that computes or validates artifacts."""


class ArtifactRoundBody(Place, artifact.ArtifactRoundBody):
    """The body that starts a round of artifacts. The node sends these to {url}/generated."""


class DecodeBody(Place, decode.DecodeBody):
    """The body of a job that computes or validates decode proofs."""


def as_json(body: Body | None) -> Any:
    """Returns a body as JSON values, without unset fields, for which the API has defaults."""
    return body.model_dump(mode="json", exclude_unset=True) if isinstance(body, BaseModel) else body


def placed(body: Body) -> dict[str, Any]:
    """Returns a body as a dict of JSON values, with the defaults of Place for missing fields."""
    return {**Place().model_dump(), **as_json(body)}
