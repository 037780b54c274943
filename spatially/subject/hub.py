"""Downloads without the wait when there is no network."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies


@contextmanager
def cache_only_without_network() -> Iterator[None]:
    """Look only into the local cache when the Hugging Face hub cannot be found.

    The hub's client tries every file six times, three quarters of a minute for each model on a machine without network.
    Behind a proxy names need not resolve here, so then the client decides for itself.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not (getproxies() or _resolves(constants.ENDPOINT))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _resolves(address: str) -> bool:
    try:
        socket.getaddrinfo(urlsplit(address).hostname, 443)
    except OSError:
        return False
    return True
