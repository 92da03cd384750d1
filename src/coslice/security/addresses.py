"""Addresses: their parts, and which of them only this machine can reach."""

import ipaddress

from coslice.errors import ConfigError


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: str, *, example: str = "127.0.0.1:50051") -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``; raises ``ConfigError``."""
    host, colon, port = address.rpartition(":")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(f"{address!r}: an IPv6 address is in brackets, as in [::1]:50051")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not host:port, for example {example}", data={"listen": address})
    return host, int(port)
