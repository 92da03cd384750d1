"""Where an etcd is, as people write it. Opens nothing."""

from urllib.parse import parse_qs, urlsplit

import msgspec

from coslice.errors import ConfigError
from coslice.security.addresses import is_loopback

SCHEME, SECURE = "etcd", "etcd+tls"
_OPTIONS = ("ca", "cert", "key", "user", "password_file")


class EtcdLocation(msgspec.Struct, frozen=True, kw_only=True):
    """``etcd://HOST:PORT[,HOST:PORT…]/PREFIX``; with TLS ``etcd+tls://…?ca=FILE[&cert=FILE&key=FILE]``."""

    hosts: tuple[str, ...]
    prefix: str
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""

    @property
    def in_the_clear(self) -> bool:
        """Does what is written there cross a network unencrypted?"""
        hosts = (host.rpartition(":")[0].strip("[]") for host in self.hosts)
        return not self.tls and not all(map(is_loopback, hosts))


def parse_etcd(location: str) -> EtcdLocation:
    """Raises ``ConfigError`` saying how it is written."""
    parts = urlsplit(location)
    how = "etcd://host:2379,host2:2379/prefix, or etcd+tls://…?ca=FILE"
    hosts = tuple(host for host in parts.netloc.split(",") if host)
    if parts.scheme not in (SCHEME, SECURE) or not hosts or "@" in parts.netloc:
        raise ConfigError(f"{location!r} is no place of an etcd: write {how}")
    for host in hosts:
        name, _, port = host.rpartition(":")
        if not name or not port.isdigit():
            raise ConfigError(f"{host!r} in {location!r} is not host:port: write {how}")
    given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if unknown := sorted(set(given) - set(_OPTIONS)):
        raise ConfigError(f"{location!r} has unknown settings {', '.join(unknown)}: {', '.join(_OPTIONS)}")
    secure = parts.scheme == SECURE
    if not secure and any(given.get(name) for name in ("ca", "cert", "key")):
        raise ConfigError(f"{location!r} names certificates: begin it with {SECURE}://")
    prefix = parts.path.strip("/") or "coslice"
    return EtcdLocation(hosts=hosts, prefix=f"{prefix}/", tls=secure, **given)
