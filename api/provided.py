"""A route's parameters from the app: `jobs: Annotated[JobStore, provided("jobs")]`."""

from typing import Any

from fastapi import Depends, Request


def provided(name: str) -> Any:
    """The app's service of that name (`Services`)."""

    async def of_app(request: Request) -> Any:  # async: FastAPI runs what is not in a thread
        return getattr(request.app.state.services, name)

    return Depends(of_app)
