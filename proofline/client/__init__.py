"""A client for a running node (docs/client.md): `Client`, `AsyncClient`, bodies and answers.

Bodies and answers are the API's pydantic models. The client imports neither torch nor FastAPI.
"""

from poc_core.answers import (
    HostStatus,
    NodeState,
    Progress,
    Stats,
    Status,
    UpStatus,
    Versions,
    Worker,
)
from poc_core.schemes.artifact.answers import ArtifactResult, ValidationResult
from poc_core.schemes.artifact.requests import Artifact, ArtifactParams
from poc_core.schemes.artifact.terms import StatTest
from poc_core.schemes.decode.answers import DecodeResult, DecodeValidationResult
from poc_core.schemes.decode.requests import DecodeParams
from poc_core.schemes.requests import JobBody, RoundBody
from proofline.client.asynchronous import AsyncClient
from proofline.client.bodies import ArtifactRoundBody, DecodeBody, GenerateBody
from proofline.client.calls import Call, Document
from proofline.client.errors import ApiError, JobFailedError, UrlError
from proofline.client.sync import Client

__all__ = [
    "ApiError",
    "Artifact",
    "ArtifactParams",
    "ArtifactResult",
    "ArtifactRoundBody",
    "AsyncClient",
    "Call",
    "Client",
    "DecodeBody",
    "DecodeParams",
    "DecodeResult",
    "DecodeValidationResult",
    "Document",
    "GenerateBody",
    "HostStatus",
    "JobBody",
    "JobFailedError",
    "NodeState",
    "Progress",
    "RoundBody",
    "StatTest",
    "Stats",
    "Status",
    "UpStatus",
    "UrlError",
    "ValidationResult",
    "Versions",
    "Worker",
]
