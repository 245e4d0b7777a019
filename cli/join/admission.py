"""Whether Redis still lets this host in, and if not, why: a revoked host ends by itself."""

import time
from collections.abc import Callable
from urllib.parse import urlsplit

from redis import AuthenticationError, Redis
from redis.exceptions import RedisError

from cli.join.access import Access
from cli.join.asking import Api, RefusedError
from poc_core.errors import ProoflineError
from poc_core.periodic import Periodic
from poc_core.settings import REDIS_TIMEOUT_S

LOOK_S = 5.0
# Seconds of refusals, in which an operator may make a user again that Redis forgot.
PATIENCE_S = 20.0


class ShutOutError(ProoflineError):
    """Redis refuses this host's user; the text says why, as far as the API tells."""


class Admission:
    """Looks every few seconds whether this host's user is still let in."""

    def __init__(
        self, access: Access, redis_url: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._access = access
        self._redis_url = redis_url
        self._clock = clock
        self._refused_since: float | None = None
        self._looks = Periodic("admission", LOOK_S, self.look)

    def begin(self) -> None:
        """Makes the first look, and starts a thread that makes the others. ShutOutError."""
        self.look()
        if self._refused_since is not None:
            raise self._shut_out()
        self._looks.start()

    def stop(self) -> None:
        self._looks.stop(timeout_s=0)

    def look(self) -> None:
        """Asks with a new connection, as an old one tells nothing."""
        asked = Redis.from_url(
            self._redis_url,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            socket_timeout=REDIS_TIMEOUT_S,
            retry=None,
        )
        try:
            with asked:
                asked.ping()
            self._refused_since = None
        except AuthenticationError:
            if self._refused_since is None:
                self._refused_since = self._clock()
        except (RedisError, OSError):
            pass  # away, which is no refusal

    def check(self) -> None:
        """ShutOutError: Redis has refused this host for PATIENCE_S."""
        since = self._refused_since
        if since is not None and self._clock() - since >= PATIENCE_S:
            raise self._shut_out()

    def _shut_out(self) -> ShutOutError:
        user = urlsplit(self._redis_url).username
        return ShutOutError(f"Redis refuses {user}, the user of this host: {self._why()}")

    def _why(self) -> str:
        access = self._access
        anew = "to have it back, the operator invites it anew"
        try:
            api = Api.at(access.api, access.api_ca, access.allow_http)
            state = api.standing(access.token_id).state
        except RefusedError as error:
            return f"the node knows its token no more ({error}); {anew}."
        except ProoflineError as error:
            return f"it may be revoked; the API does not tell ({error})."
        if state == "revoked":
            return f"the host is revoked; {anew}."
        return "Redis has forgotten it; the operator runs `proofline hosts restore`."
