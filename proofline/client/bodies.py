"""The API's bodies, with a place among others that a trial need not give.

The API itself wants that place told: a node that forgets to would compute another's nonces.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from poc_core.fields import Count
from poc_core.schemes.artifact import requests as artifact
from poc_core.schemes.decode import requests as decode

Body = BaseModel | Mapping[str, Any]


class Place(BaseModel):
    """The block's height, and which of how many nodes this one is: the first of one."""

    block_height: Count = 0
    node_id: Count = 0
    node_count: Count = 1


class GenerateBody(Place, artifact.GenerateBody):
    """Artifacts of given nonces: `params` is ArtifactParams, `nonces` a list of integers."""


class ArtifactRoundBody(Place, artifact.ArtifactRoundBody):
    """A round of artifacts: `params` is ArtifactParams, `url` gets them at {url}/generated."""


class DecodeBody(Place, decode.DecodeBody):
    """Chains of given nonces: `params` is DecodeParams, `nonces` a list of integers."""


def as_json(body: Body | None) -> Any:
    """The fields given of a model: the API has its own defaults for the rest."""
    return body.model_dump(mode="json", exclude_unset=True) if isinstance(body, BaseModel) else body


def placed(body: Body) -> dict[str, Any]:
    """The JSON of a body that starts a job or a round, with the place that it leaves out."""
    return {**Place().model_dump(), **as_json(body)}
