"""/api/v1/hosts: joining a new host with the token of `proofline hosts invite`.

The host sends only the token's id. The API never receives the token or a password.
"""

from fastapi import APIRouter, HTTPException, Request

from api.edge.doorkeeper import Rates
from api.edge.shares import of_address
from api.errors import unavailable
from api.routes import examples
from api.routes.services import AppServices
from poc_core import answers
from poc_core.joining.invitations import SpentTokenError, UnknownTokenError
from poc_core.joining.offers import SealedOffer

router = APIRouter(prefix="/api/v1/hosts", tags=["hosts"], responses=examples.REDIS_AWAY)


@router.post("/join", summary="Join with a token", responses=examples.JOIN_ERRORS)
def join(request: Request, services: AppServices) -> SealedOffer:
    """Returns a worker host's signed settings, once per token (Authorization: Bearer TOKEN_ID)."""
    peer = _peer(request, services.token_rates)
    try:
        invitation, offer = services.invitations.take(_token_id(request), peer)
    except UnknownTokenError as error:
        raise _unknown(error) from None
    except SpentTokenError as error:
        raise HTTPException(403, str(error)) from None
    services.events.note("node", f"Host {invitation.name} joined, from {peer}.", invitation.name)
    return offer


@router.get("/standing", summary="Check a token", responses=examples.HOST_ERRORS)
def standing(request: Request, services: AppServices) -> answers.HostStanding:
    """Returns whether the token can still be used, or where it was used. Changes nothing."""
    _peer(request, services.token_rates)
    try:
        found = services.invitations.find(_token_id(request))
    except UnknownTokenError as error:
        raise _unknown(error) from None
    state = found.state(services.health.now())
    return answers.HostStanding(name=found.name, state=state.value, redis=found.redis)


def _peer(request: Request, rates: Rates) -> str:
    peer = request.client.host if request.client else ""
    if rates.take(of_address(peer)) > 0:
        raise unavailable("Too many tokens were tried from here; wait a little.", 429)
    return peer


def _token_id(request: Request) -> str:
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else ""


def _unknown(error: UnknownTokenError) -> HTTPException:
    return HTTPException(401, str(error), headers={"WWW-Authenticate": "Bearer"})
