"""Sending a completed job's answer as Redis holds it."""

from fastapi import Response
from fastapi.responses import StreamingResponse

from poc_core.state import JobStore

_JSON = "application/json"


def result_response(jobs: JobStore, job_id: str) -> Response | None:
    """A completed job's answer, in pieces if large; None: expired. Reads Redis: use a thread."""
    answer = jobs.result(job_id)
    if answer is None:
        return None
    if not answer.is_in_pieces:
        return Response(b"".join(answer.pieces), media_type=_JSON)
    return StreamingResponse(
        answer.pieces, media_type=_JSON, headers={"Content-Length": str(answer.n_bytes)}
    )
