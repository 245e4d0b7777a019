"""The thread that tells Redis what this process has seen."""

from api.services import Services
from api.version import VERSION
from poc_core.periodic import Periodic

# A second of what happened is told as of the next: less than a step of the history.
TELL_S = 1.0


def telling(services: Services) -> Periodic:
    """Tells once a second, where there is anything to tell; what fails is logged."""

    untold = [f"The API {VERSION} has started on {services.settings.host}."]
    told_addresses_at = float("-inf")

    def tell() -> None:
        nonlocal told_addresses_at
        while untold:
            services.events.note("node", untold[0])
            untold.pop(0)
        if services.now() - told_addresses_at >= services.settings.worker_ttl_s:
            services.workers.tell_api()
            told_addresses_at = services.now()
        services.chats.tell(services.history, services.now())
        services.refusals.tell(services.events)

    return Periodic("telling", TELL_S, tell)
