"""Where a node listens: HOST:PORT, and whether that needs a secret."""

import ipaddress
import socket
from dataclasses import dataclass

from headrace.terms.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """A host (a name or an IPv4 number) and a port; for listening, port 0 means any free one."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str, *, key: str = "listen") -> "Address":
        """Return the address that `HOST:PORT` names; `key` is named in errors.

        Raises:
            ConfigError: the text is no such address.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
            raise ConfigError(f"{key}: {text!r} is no HOST:PORT; give one such as 127.0.0.1:29500")
        return cls(host, int(port))

    def number(self, *, key: str = "listen") -> str:
        """Return the host's IPv4 number.

        Raises:
            ConfigError: the name is unknown.
        """
        try:
            return socket.gethostbyname(self.host)
        except OSError as error:
            raise ConfigError(f"{key}: the host {self.host!r} is not known ({error.strerror}); give its IP address") from error

    def own_number(self, *, key: str) -> str:
        """Return the IPv4 number of this machine's interface that leads there. Raises as `number`."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.number(key=key), self.port or 1))
            return str(probe.getsockname()[0])

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.number()).is_loopback

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"
