"""The thread that tells Redis what this process has seen."""

from api.services import Services
from poc_core.periodic import Periodic

# A second of what happened is told as of the next: less than a step of the history.
TELL_S = 1.0


def telling(services: Services) -> Periodic:
    """Tells once a second, where there is anything to tell; what fails is logged."""

    def tell() -> None:
        services.chats.tell(services.history, services.now())
        services.refusals.tell(services.events)

    return Periodic("telling", TELL_S, tell)
