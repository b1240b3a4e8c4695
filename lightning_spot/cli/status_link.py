"""The link of ``lightning-spot status --open``."""

from __future__ import annotations

import re

from lightning_spot.client.server_client import ServerClient
from lightning_spot.errors import ServerRefusedError
from lightning_spot.protocol.wire import parse_spot_url
from lightning_spot.untrusted import plain, text

_PATH = re.compile(r"/open/[\w-]{1,100}", re.ASCII)


def link(server_url: str) -> str:
    """Have a server make a link to its status page, which a browser may open once, within a minute.

    Raises:
        SettingsError: if ``server_url`` is no server's.
        ServerUnreachableError: if no server answers there.
        ServerRefusedError: if it refuses the token, or answers with another address.
    """
    address, _ = parse_spot_url(server_url)
    path = text(ServerClient(address).call("POST", "/v1/links"), "path")
    if not _PATH.fullmatch(path):  # else it could lead to another host
        raise ServerRefusedError(f"{address} answered with {plain(path)!r} instead of a link", tier=str(address))
    return f"http://{address.host}:{address.port}{path}"
