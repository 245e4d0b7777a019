"""Injects the app's services into routes: `jobs: Annotated[JobStore, provided("jobs")]`."""

from typing import Any

from fastapi import Depends, Request


def provided(name: str) -> Any:
    """Returns a dependency that resolves to the app's service of that name (`Services`)."""

    # async: FastAPI runs a synchronous dependency in a thread
    async def of_app(request: Request) -> Any:
        return getattr(request.app.state.services, name)

    return Depends(of_app)
