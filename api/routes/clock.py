"""/api/v1/clock: what time it is here, for the network's prober, which compares clocks."""

import time

from fastapi import APIRouter, Response

router = APIRouter(tags=["health"])


@router.get("/api/v1/clock", summary="This machine's clock", status_code=204)
async def clock() -> Response:
    """Two headers: X-Server-Recv-Ns, when the request came, X-Server-Send-Ns, when the answer left.

    Unix time in nanoseconds. Needs no key; asks neither Redis nor workers.
    """
    received = time.time_ns()
    response = Response(status_code=204, headers={"X-Server-Recv-Ns": str(received)})
    response.headers["X-Server-Send-Ns"] = str(time.time_ns())
    return response
