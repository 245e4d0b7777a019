"""What the address that the API listens on means for callbacks (poc_core/callbacks.py)."""

from collections.abc import Mapping

from poc_core.callbacks import literal_address

_ALLOW = "POC_CALLBACK_ALLOW"


def receiver_settings(host: str, port: int, env: Mapping[str, str]) -> dict[str, str]:
    """Settings that keep an open API's strangers off this host's loopback; those in `env` win."""
    settings = {"POC_API_PORT": str(port)}
    address = literal_address(host)
    if host != "localhost" and (address is None or not address.is_loopback) and not env.get(_ALLOW):
        settings[_ALLOW] = "public,private"
    return settings
