"""/api/v1/clock: what time it is here, for the network's prober, which compares clocks."""

import time

from fastapi import APIRouter, Response

router = APIRouter(tags=["health"])


@router.get("/api/v1/clock", summary="Read this machine's clock", status_code=204)
async def clock() -> Response:
    """X-Server-Recv-Ns is the time of the request, X-Server-Send-Ns that of the answer.

    Unix time in nanoseconds. Needs no key.
    """
    received = time.time_ns()
    response = Response(status_code=204, headers={"X-Server-Recv-Ns": str(received)})
    response.headers["X-Server-Send-Ns"] = str(time.time_ns())
    return response
