"""The store in which peers meet: one of them listens, the others connect to it."""

import socket
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from headrace.peers.meet.address import Address
from headrace.terms.errors import ConfigError, PeerLost

# How long a store may take to answer.
_TIMEOUT = timedelta(seconds=10)
_CONNECT_SECONDS = 5.0


def refuse_without_secret(addresses: Sequence[Address], secret: bytes | None, key: str) -> None:
    """Raise ConfigError if other machines can reach one of `addresses`, and there is no secret."""
    if secret is None and not all(each.is_loopback for each in addresses):
        raise ConfigError(
            f"{key}: {', '.join(map(str, addresses))} can be reached from other machines; give --secret FILE, the same file on "
            "each, or listen on 127.0.0.1"
        )


def hosted_store(address: Address, *, key: str) -> TCPStore:
    """Return a store that listens at that interface alone, until it is deleted: by itself, one would listen at all of them.

    Raises:
        ConfigError: the address cannot be used.
    """
    host = address.number(key=key)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, address.port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        words = "" if key == "stages" else ", 0 for any"
        raise ConfigError(f"{key}: {address}: {error.strerror}; name a free port of this machine{words}") from error
    port = listening.getsockname()[1]  # before it is the store's
    return TCPStore(host, port, None, True, _TIMEOUT, wait_for_workers=False, master_listen_fd=listening.detach())


def joined_store(address: Address, name: str, *, key: str, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """Return a connection to the store at `address`, which belongs to the peer `name`.

    Raises:
        PeerLost: nothing listens there. ConfigError: the host is not known.
    """
    host = address.number(key=key)
    # The library would try again and again, with warnings, so a plain connection is tried first.
    try:
        socket.create_connection((host, address.port), timeout=_CONNECT_SECONDS).close()
        return TCPStore(host, address.port, is_master=False, timeout=timeout)
    except (OSError, DistError, RuntimeError) as error:
        raise PeerLost(f"{name}: nothing listens there") from error
