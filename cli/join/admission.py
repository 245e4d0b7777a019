"""Checks repeatedly whether Redis still accepts this host's user; a revoked host stops."""

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from redis import AuthenticationError
from redis.exceptions import RedisError

from cli.join.access import Access
from cli.join.asking import Api, RefusedError
from poc_core.errors import ProoflineError
from poc_core.periodic import Periodic
from poc_core.redis_at import connections
from poc_core.redis_at.url import RedisUrl
from poc_core.settings import REDIS_TIMEOUT_S

LOOK_S = 5.0
_ANEW = "to have it back, the operator invites it again"


class ShutOutError(ProoflineError):
    """Redis refuses this host's user. The text gives the reason, as far as the API reports it."""


@dataclass(repr=False)
class Admission:
    """A thread that checks every LOOK_S seconds whether Redis accepts this host's user."""

    access: Access
    redis_url: str
    announce: Callable[[str], None]

    def __post_init__(self) -> None:
        self._refusal: str | None = None  # found by the last check
        self._is_for_good = False
        self._looks = Periodic("admission", LOOK_S, self.look)

    def begin(self) -> None:
        """Makes the first check, and starts the thread. Raises ShutOutError if Redis refuses."""
        self.look()
        if self._refusal is not None:
            raise ShutOutError(self._refusal)
        self._looks.start()

    def stop(self) -> None:
        self._looks.stop(timeout_s=0)

    def check(self) -> None:
        """Raises ShutOutError if this host was revoked.

        Raises nothing if Redis has only lost the host's user, for example in a restart, because the
        operator can restore the user.
        """
        if self._refusal is not None and self._is_for_good:
            raise ShutOutError(self._refusal)

    def look(self) -> None:
        """Checks whether Redis accepts this host's user, and announces a changed result.

        If Redis refuses the user, asks the API for the reason. Uses a new connection each time,
        because Redis does not check open connections again.
        """
        before, self._refusal = self._refusal, self._refused()
        if before != self._refusal:
            self.announce(self._refusal or "Redis lets this host in")

    def _refused(self) -> str | None:
        asked = connections.client(
            RedisUrl.of(self.redis_url),
            socket_connect_timeout=REDIS_TIMEOUT_S,
            socket_timeout=REDIS_TIMEOUT_S,
            retry=None,
        )
        try:
            with asked:
                asked.ping()
        except AuthenticationError:
            user = urlsplit(self.redis_url).username
            return f"Redis refuses {user}, the user of this host: {self._why()}"
        except (RedisError, OSError):  # an unavailable Redis is no refusal
            return self._refusal
        return None

    def _why(self) -> str:
        try:
            api = Api.at(self.access.api, self.access.api_ca, self.access.allow_http)
            state = api.standing(self.access.token_id).state
        except ProoflineError as error:
            self._is_for_good = isinstance(error, RefusedError) and error.status == 401
            if self._is_for_good:
                return f"the node knows its token no more; {_ANEW}."
            return f"it may be revoked; the API does not tell ({error})."
        self._is_for_good = state == "revoked"
        if self._is_for_good:
            return f"the host is revoked; {_ANEW}."
        return "Redis has forgotten it; the operator runs `proofline hosts restore`."
